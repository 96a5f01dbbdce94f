"""HTML views of a generation, for a notebook's output and for the page.

Each is a fragment without scripts or further files, with its own style.
In a notebook: `IPython.display.HTML(views.of_output(tokenizer, output))`.
"""

from collections.abc import Sequence
import pathlib

import jinja2

from experiments.decoding import rounds as rounds_lib
import specsample
from specsample import text as text_lib

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
ENVIRONMENT = jinja2.Environment(
  loader=jinja2.FileSystemLoader(TEMPLATES),
  autoescape=True,
  undefined=jinja2.StrictUndefined,
)
# Methods stay in the order of the configuration.
ENVIRONMENT.policies['json.dumps_kwargs'] = {'sort_keys': False}
_NAMES = {
  'prompt': 'prompt',
  'accepted': 'accepted draft',
  'correction': 'correction by the target',
  'bonus': 'bonus token of the target',
  'plain': 'plain: nothing was drafted',
}
# Stands for a token without text of its own: the start of a multi-byte
# character, whose text belongs to the last of its tokens.
_NO_TEXT = '\u25cc'


def of_output(
  tokenizer: text_lib.Tokenizer, output: specsample.Output, row: int = 0
) -> str:
  """Returns who wrote each token of a row: the drafter, or the target and why.

  The token that ends a turn is shown too.
  """
  length = int(output.lengths[row])
  ids = output.tokens[row, :length].tolist()
  return of_tokens(
    text_lib.pieces(tokenizer, ids, skip_special=False),
    output.origin[row, :length].tolist(),
    output.emit_round[row, :length].tolist(),
  )


def of_tokens(
  texts: Sequence[str], origins: Sequence[int], rounds: Sequence[int]
) -> str:
  """Returns who wrote each token.

  The texts are those of `text.pieces`; origins and rounds are as in `Output`.
  """
  tokens = [
    (
      specsample.Origin(origin).name.lower(),
      number,
      (text or _NO_TEXT).replace('\n', '\u23ce\n'),
    )
    for text, origin, number in zip(texts, origins, rounds, strict=True)
  ]
  template = ENVIRONMENT.get_template('tokens.html')
  return template.render(tokens=tokens, names=_NAMES)


def of_rounds(rounds: Sequence[rounds_lib.Round]) -> str:
  """Returns every draft token of the rounds, and what became of it."""
  template = ENVIRONMENT.get_template('rounds.html')
  return template.render(rounds=rounds, lib=rounds_lib, repr=repr)
