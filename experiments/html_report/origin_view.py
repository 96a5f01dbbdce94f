"""An HTML view of who wrote each token: the drafter, or the target and why.

The view is a fragment without scripts or further files, so that it fits into a
notebook's output and into a page. Colours tell the authors apart; for readers
who cannot see the colours or print in grey, so do the lines under the tokens.
"""

from collections.abc import Sequence
import html

import specsample
from specsample import text as text_lib

_NAMES = {
  specsample.Origin.PROMPT: 'prompt',
  specsample.Origin.ACCEPTED: 'accepted draft',
  specsample.Origin.CORRECTION: 'correction by the target',
  specsample.Origin.BONUS: 'bonus token of the target',
  specsample.Origin.PLAIN: 'plain: nothing was drafted',
}
# Stands for a token without text of its own: the start of a multi-byte
# character, whose text belongs to the last of its tokens.
_NO_TEXT = '\u25cc'

# Tints of Okabe and Ito's colours, which can be told apart with every kind of
# colour vision. Text is dark on every page.
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
  """Returns a whole fragment for one row, with its style and legend.

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
  """Frames the result of `tokens`, with the legend above it.

  `STYLE` has to be on the page.
  """
  return f'<div class="origin-view">{legend()}{shown}</div>'


def legend() -> str:
  """Returns the legend of the colours and lines."""
  marks = ', '.join(
    f'<span class="{_classes(origin)}">{name}</span>'
    for origin, name in _NAMES.items()
    if origin is not specsample.Origin.PROMPT
  )
  return f'<div>{marks}; a bar marks the start of a round</div>'


def tokens(
  texts: Sequence[str], origins: Sequence[int], rounds: Sequence[int]
) -> str:
  """Returns the tokens as marked spans; their text is escaped.

  Args:
    texts: the text of each token, see `text.pieces`.
    origins: a `specsample.Origin` per token, as in `Output.origin`.
    rounds: the round that emitted each token, as in `Output.emit_round`.

  Raises:
    ValueError: the lengths differ, or a number is not an origin.
  """
  if not len(texts) == len(origins) == len(rounds):
    raise ValueError(
      f'{len(texts)} texts, {len(origins)} origins and {len(rounds)} rounds: '
      'give one text, origin and round for every token'
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
