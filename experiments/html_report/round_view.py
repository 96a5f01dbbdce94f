"""An HTML view of rounds: every draft token, and what became of it.

The view is a fragment without scripts or further files, for a notebook's output
and for a page. It takes its colours from there, light or dark.
"""

from collections.abc import Iterator, Sequence
import html

from experiments.decoding import rounds as rounds_lib

STYLE = """\
.round-view { overflow-x: auto; font-size: .8125rem; }
.round-view table { border-collapse: collapse; }
.round-view th, .round-view td { padding: .15rem .6rem; text-align: right;
  border: 0; position: static; }
.round-view :is(th, td):is(:first-child, :nth-child(n+5)) {
  text-align: left; }
.round-view tbody th { padding-top: .9rem; }
.round-view .t { font-family: monospace; white-space: pre; }
.round-view .kept .t { font-weight: bold; }
.round-view del { opacity: .65; }
"""
_TITLES = ('', *rounds_lib.COLUMNS, '', 'draft token')


def of_rounds(rounds: Sequence[rounds_lib.Round]) -> str:
  """Returns a whole fragment, with its style.

  In a notebook: `IPython.display.HTML(round_view.of_rounds(...))`.
  """
  return f'<style>{STYLE}</style>{view(rounds)}'


def view(rounds: Sequence[rounds_lib.Round]) -> str:
  """Returns the rounds as a table; `STYLE` has to be on the page."""
  titles = ''.join(f'<th scope="col">{title}</th>' for title in _TITLES)
  bodies = ''.join(f'<tbody>{"".join(_lines(one))}</tbody>\n' for one in rounds)
  return (
    f'<div class="round-view" tabindex="0"><p>{html.escape(rounds_lib.LEGEND)}.'
    f'</p>\n<table><thead><tr>{titles}</tr></thead>\n{bodies}</table></div>'
  )


def _lines(one: rounds_lib.Round) -> Iterator[str]:
  whole = f'colspan="{len(_TITLES)}"'
  yield f'<tr><th scope="rowgroup" {whole}>round {one.number}</th></tr>'
  for x in one.candidates:
    cells = (rounds_lib.place(one, x), *rounds_lib.numbers(x), x.fate)
    text = html.escape(repr(x.text))
    if x.fate in rounds_lib.STRUCK:
      text = f'<del>{text}</del>'
    yield (
      f'<tr{" class=kept" if x.fate == rounds_lib.KEPT else ""}>'
      + ''.join(f'<td>{cell}</td>' for cell in cells)
      + f'<td class="t">{text}</td></tr>'
    )
  if one.next is not None:
    yield (
      f'<tr><td {whole}>'
      f'+ <b class="t">{html.escape(repr(one.next.text))}</b> '
      f'{html.escape(rounds_lib.sentence(one.next))}</td></tr>'
    )
