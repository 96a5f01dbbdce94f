"""The rounds of a generation in a terminal, then its text."""

import rich.console
import rich.text

from experiments.decoding import generation
from experiments.decoding import rounds
from specsample import text as text_lib

_STYLES = {
  rounds.KEPT: 'green',
  rounds.REJECTED: 'red strike',
  rounds.FALLS: 'dim strike',
  rounds.NOT_TRIED: 'dim',
  rounds.PAST_THE_END: 'dim',
}
_PLACE = 15  # width of the first column


class RoundView:
  """A view of each round as a table, then of the whole text.

  Rejected tokens are struck through; without a terminal they are between ~~.
  """

  def __init__(
    self, tokenizer: text_lib.Tokenizer, console: rich.console.Console
  ):
    """Starts a view on `console`; `tokenizer` turns the tokens into text."""
    self._console = console
    self._stream = text_lib.TextStream(tokenizer)
    self._text = ''

  def show(self, shown: generation.Chunk) -> None:
    """See `display.View`."""
    self._text += self._stream.push(shown.tokens)
    for one in shown.rounds:
      self._print(_table(one, self._console.is_terminal))

  def close(self) -> None:
    """See `display.View`."""
    self._text += self._stream.finish()
    self._print(rich.text.Text(f'\n{self._text}'))

  def _print(self, text):
    self._console.print(text, soft_wrap=not self._console.is_terminal)


def print_legend(console: rich.console.Console) -> None:
  """Prints what the columns mean."""
  legend = rich.text.Text(rounds.LEGEND)
  console.print(legend, soft_wrap=not console.is_terminal)


def _table(one: rounds.Round, can_strike: bool) -> rich.text.Text:
  """Returns a line per draft token, and one for the token after them."""
  lines = [rich.text.Text(f'\nround {one.number}')]
  if one.candidates:
    lines[0].pad_right(_PLACE + 1 - len(lines[0]))
    lines[0].append(_columns(rounds.COLUMNS))
  lines[0].stylize('bold')
  for x in one.candidates:
    place = rounds.place(one, x)
    numbers = _columns(rounds.numbers(x))
    line = rich.text.Text(f'{f"  {place}":<{_PLACE}}{numbers}  {x.fate:<9}  ')
    text = repr(x.text)
    if x.fate in rounds.STRUCK and not can_strike:
      text = f'~~{text}~~'
    lines.append(line.append(text, _STYLES[x.fate]))
  if one.next is not None:
    line = rich.text.Text('  + ').append(repr(one.next.text), 'bold')
    lines.append(line.append(f'  {rounds.sentence(one.next)}'))
  return rich.text.Text('\n').join(lines)


def _columns(texts):
  return ''.join(f'{text:>9}' for text in texts)
