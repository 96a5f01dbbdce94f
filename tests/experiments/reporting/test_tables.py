"""Tables in terminals of any width, with names of any kind."""

import pytest

from experiments.evaluation import results
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables

# rich would read these as a closing tag, a colour, an emoji and a link.
_NAMES = ('a[/b]', '[red]x', ':bug:', '[link=x]y', 'long name ' * 9 + 'end')
_HEADINGS = (
  *('method', 'K', 'tokens per round', 'speedup', '95% interval'),
  *(f'c{i}' for i in range(9)),
)


def _print(*shown):
  console = tables.console()
  for one in shown:
    console.print(one)


def _table():
  columns = range(1, len(_HEADINGS))
  return tables.Table(
    _HEADINGS,
    [[name, *(f'{i}x{j}' for j in columns)] for i, name in enumerate(_NAMES)],
  )


@pytest.mark.parametrize('width', [30, 80, 100, 300])
def test_nothing_is_cut_at_any_width(width, in_terminal):
  text = in_terminal(width, _print, _table())
  assert max(map(len, text.splitlines())) <= width
  words = text.split()
  for i in range(len(_NAMES)):
    for j in range(1, len(_HEADINGS)):
      assert words.count(f'{i}x{j}') == 1
  for heading in _HEADINGS:
    assert set(heading.split()) <= set(words)
  for name in _NAMES[:-1]:
    assert name in text
  # A name that is folded keeps its end.
  assert 'end' in words


def test_a_part_repeats_the_names(in_terminal):
  parts = in_terminal(50, _print, _table()).split('method')[1:]
  assert len(parts) > 1
  for part in parts:
    assert all(name in part for name in _NAMES[:-1])
  (whole,) = in_terminal(300, _print, _table()).split('method')[1:]
  assert _NAMES[-1] in whole


def test_lines_about_methods_have_their_names(in_terminal):
  found = {
    'a[/b]': rows_lib.Mismatches(0, 0),
    '[red]x': rows_lib.Mismatches(1, 0),
    ':bug:': rows_lib.Mismatches(0, 1),
    '[x]': rows_lib.Mismatches(1, 0, 1),
  }
  lines = results.mismatch_lines(found)
  text = in_terminal(100, _print, *lines, 'a str [/b] [red] :bug:')
  for name in (*found, 'a str [/b] [red] :bug:'):
    assert name in text
