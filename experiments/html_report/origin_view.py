"""Who wrote each token, as HTML: the drafter, or the target and why.

A fragment without scripts or files of its own, for a notebook's output and for
a page. A token's author is told by colour and, for those who do not see it or
print in grey, by the line under it.
"""

from collections.abc import Sequence
import html

import specsample
from specsample import text as text_lib

_NAMES = {
  specsample.Origin.PROMPT: 'prompt',
  specsample.Origin.ACCEPTED: 'accepted draft',
  specsample.Origin.CORRECTION: 'correction by the target',
  specsample.Origin.BONUS: 'bonus of the target',
  specsample.Origin.PLAIN: 'plain, nothing was drafted',
}
# Stands for a token that gives no text of its own: the start of a character of
# several bytes, whose text is with the last of them.
_NO_TEXT = '\u25cc'

# Tints of Okabe and Ito's colours, which stay apart for every kind of colour
# vision. Text is dark whatever the page around it.
STYLE = """\
.origin-view { background: #fff; color: #111; padding: .6em .8em;
  line-height: 2; overflow-wrap: anywhere; font-family: sans-serif; }
.origin-view .tokens { white-space: pre-wrap; margin: .4em 0 0; }
.origin-view .o { padding: 1px 0 2px; }
.origin-view .first { border-left: 2px solid #111; padding-left: 1px;
  margin-left: 2px; }
.origin-view .prompt { color: #555; }
.origin-view .accepted { background: #d5efe6;
  border-bottom: 3px solid #007a59; }
.origin-view .correction { background: #fbdcc7; font-weight: bold;
  border-bottom: 4px double #b34700; }
.origin-view .bonus { background: #d3e7f6;
  border-bottom: 3px dotted #005f96; }
"""


def of_output(
  tokenizer: text_lib.Tokenizer, output: specsample.Output, row: int = 0
) -> str:
  """A whole fragment, its style and legend included, of one row of an output.

  In a notebook: `IPython.display.HTML(origin_view.of_output(...))`.
  """
  length = int(output.lengths[row])
  ids = output.tokens[row, :length].tolist()
  shown = tokens(
    # The token that ends a turn is shown too.
    text_lib.pieces(tokenizer, ids, skip_special=False),
    output.origin[row, :length].tolist(),
    output.emit_round[row, :length].tolist(),
  )
  return f'<style>{STYLE}</style>{view(shown)}'


def view(shown: str) -> str:
  """The frame of what `tokens` returned, with the legend above it.

  `STYLE` has to be on the page.
  """
  return f'<div class="origin-view">{legend()}{shown}</div>'


def legend() -> str:
  """What the colours and lines mean."""
  marks = ', '.join(
    f'<span class="{_classes(origin)}">{name}</span>'
    for origin, name in _NAMES.items()
    if origin is not specsample.Origin.PROMPT
  )
  return f'<div>{marks}; a bar begins a round</div>'


def tokens(
  texts: Sequence[str], origins: Sequence[int], rounds: Sequence[int]
) -> str:
  """The tokens, marked; what they hold is text, never markup.

  Args:
    texts: of each token, see `text.pieces`.
    origins: a `specsample.Origin` each, as `Output.origin`.
    rounds: that emitted each, as `Output.emit_round`.

  Raises:
    ValueError: not as many of one as of another, or no origin.
  """
  if not len(texts) == len(origins) == len(rounds):
    raise ValueError(
      f'{len(texts)} texts, {len(origins)} origins and {len(rounds)} rounds: '
      'give one of each for every token'
    )
  shown = []
  before = None
  for text, number, in_round in zip(texts, origins, rounds, strict=True):
    origin = specsample.Origin(number)
    is_first = in_round != before and origin is not specsample.Origin.PROMPT
    before = in_round
    title = _NAMES[origin]
    if origin is not specsample.Origin.PROMPT:
      title = f'round {in_round + 1}: {title}'
    visible = (text or _NO_TEXT).replace('\n', '\u23ce\n')
    shown.append(
      f'<span class="{_classes(origin, is_first)}" title="{title}">'
      f'{html.escape(visible)}</span>'
    )
  return f'<div class="tokens">{"".join(shown)}</div>'


def _classes(origin, is_first=False):
  name = origin.name.lower()
  return f'o {name} first' if is_first else f'o {name}'
