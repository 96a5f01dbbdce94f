"""Display of a generation: its text, plain or marked, and its metrics."""

from collections.abc import Callable, Iterable, Sequence
import io
import itertools
import os
import sys
from typing import Any, Protocol

import rich.console
import rich.text

from experiments.decoding import rounds
from experiments.decoding import stream
import specsample
from specsample import text as text_lib

# The colours are those of Figure 1 of Leviathan et al., 2211.17192.
_ORIGINS = {
  specsample.Origin.ACCEPTED: ('accepted draft', 'green'),
  specsample.Origin.CORRECTION: ('correction', 'bold red'),
  specsample.Origin.BONUS: ('bonus', 'bold blue'),
  specsample.Origin.PLAIN: ('plain (the round drafted nothing)', ''),
}
_FATES = {
  rounds.KEPT: 'green',
  rounds.REJECTED: 'red strike',
  rounds.FALLS: 'dim strike',
  rounds.NOT_TRIED: 'dim',
  rounds.PAST_THE_END: 'dim',
}
_PLACE = 15  # width of the first column of a round


class View(Protocol):
  """A display of texts, one after another, as their chunks come."""

  def show(self, chunk: stream.Chunk) -> None:
    """Shows one more chunk."""

  def close(self) -> None:
    """Shows what was held back, and ends the text."""


def show(
  chunks: Iterable[stream.Chunk],
  views: Sequence[View],
  metrics: Callable[[stream.Chunk], str],
) -> list[stream.Chunk]:
  """Shows chunks as they come, then the metrics; returns the chunks.

  If it is interrupted, it still shows the metrics so far. `metrics` returns
  their text, given the last chunk.
  """
  shown: list[stream.Chunk] = []
  try:
    for one in chunks:
      shown.append(one)
      for view in views:
        view.show(one)
  finally:
    if shown:
      for view in views:
        view.close()
      note(metrics(shown[-1]))
  return shown


def views(
  tokenizer: text_lib.Tokenizer,
  marked: Callable[[text_lib.Tokenizer, rich.console.Console], View] | None,
) -> list[View]:
  """Returns the views of what is generated.

  If standard output is not a terminal, it gets the plain text and standard
  error the marked text. If both are the same file, only the marked text is
  written, so that no token appears twice. `marked` is `OriginView` or
  `RoundView`; None for no marks.
  """
  found: list[View] = []
  if marked is None or not (sys.stdout.isatty() or _streams_are_one()):
    found.append(TextView(tokenizer))
  if marked is not None:
    console = rich.console.Console(stderr=not sys.stdout.isatty())
    found.append(marked(tokenizer, console))
  return found


def _streams_are_one():
  """Returns whether standard output and standard error are one file or pipe."""
  try:
    out, err = (os.fstat(x.fileno()) for x in (sys.stdout, sys.stderr))
  except (OSError, ValueError):  # neither file nor pipe
    return False
  return os.path.samestat(out, err)


class TextView:
  """A view that writes plain, unwrapped text to standard output."""

  def __init__(self, tokenizer: text_lib.Tokenizer):
    """Starts a view; `tokenizer` turns the tokens into text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='replace')
    self._stream = text_lib.TextStream(tokenizer)

  def show(self, chunk: stream.Chunk) -> None:
    self._write(self._stream.push(chunk.tokens))

  def close(self) -> None:
    """See `View`; a newline ends the text."""
    self._write(self._stream.finish() + '\n')

  def _write(self, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class OriginView:
  """A view of running text, coloured by the origin of each token.

  Without colours, accepted draft tokens appear in brackets.
  """

  def __init__(
    self, tokenizer: text_lib.Tokenizer, console: rich.console.Console
  ):
    """Prints the legend on `console`; `tokenizer` turns tokens into text."""
    self._console = console
    self._stream = text_lib.TextStream(tokenizer)
    self._has_colours = console.color_system is not None and not (
      console.no_color
    )
    if self._has_colours:
      parts = [rich.text.Text(*pair) for pair in _ORIGINS.values()]
      legend = rich.text.Text(', ').join(parts)
    else:
      accepted, *others, plain = [name for name, _ in _ORIGINS.values()]
      legend = rich.text.Text(
        f'[{accepted}], unmarked: {", ".join(others)} or {plain}'
      )
    console.print(legend, soft_wrap=not console.is_terminal)

  def show(self, chunk: stream.Chunk) -> None:
    shown = rich.text.Text()
    marked = zip(chunk.origins, chunk.tokens, strict=True)
    for origin, run in itertools.groupby(marked, lambda pair: pair[0]):
      text = self._stream.push([token for _, token in run])
      if self._has_colours:
        _, style = _ORIGINS[origin]
        shown.append(text, style)
      elif text and origin is specsample.Origin.ACCEPTED:
        shown.append(f'[{text}]')
      else:
        shown.append(text)
    self._print(shown)

  def close(self) -> None:
    self._print(self._stream.finish() + '\n')

  def _print(self, text):
    # The terminal breaks the lines.
    self._console.print(
      text, end='', soft_wrap=True, markup=False, highlight=False
    )


class RoundView:
  """A view of each round as a table, then of the whole text.

  Rejected tokens are struck through; without a terminal they are between ~~.
  """

  def __init__(
    self, tokenizer: text_lib.Tokenizer, console: rich.console.Console
  ):
    """Prints the legend on `console`; `tokenizer` turns tokens into text."""
    self._console = console
    self._stream = text_lib.TextStream(tokenizer)
    self._text = ''
    self._print(rich.text.Text(rounds.LEGEND))

  def show(self, chunk: stream.Chunk) -> None:
    self._text += self._stream.push(chunk.tokens)
    for one in chunk.rounds:
      self._print(_table(one, self._console.is_terminal))

  def close(self) -> None:
    self._print(rich.text.Text(f'\n{self._text}{self._stream.finish()}'))
    self._text = ''

  def _print(self, text):
    self._console.print(text, soft_wrap=not self._console.is_terminal)


def _table(one: rounds.Round, can_strike: bool) -> rich.text.Text:
  """Returns a line per draft token, and one for the token after them."""
  columns = lambda texts: ''.join(f'{text:>9}' for text in texts)
  titles = f'round {one.number}'
  if one.candidates:
    titles = f'{titles:<{_PLACE}}{columns(rounds.COLUMNS)}'
  lines = [rich.text.Text('\n').append(titles, 'bold')]
  for x, cells in zip(one.candidates, rounds.cells(one), strict=True):
    place, *numbers, fate = cells
    start = f'{f"  {place}":<{_PLACE}}{columns(numbers)}  {fate:<9}  '
    text = repr(x.text)
    if fate in rounds.STRUCK and not can_strike:
      text = f'~~{text}~~'
    lines.append(rich.text.Text(start).append(text, _FATES[fate]))
  if one.next is not None:
    line = rich.text.Text('  + ').append(repr(one.next.text), 'bold')
    lines.append(line.append(f'  {rounds.sentence(one.next)}'))
  return rich.text.Text('\n').join(lines)


def note(text: str) -> None:
  """Prints on standard error; on a terminal, breaks lines between words."""
  errors = rich.console.Console(stderr=True)
  errors.print(
    text,
    style='dim',
    markup=False,
    highlight=False,
    soft_wrap=not errors.is_terminal,
  )


def say_if_empty(shown: Sequence[stream.Chunk]) -> None:
  """Says what helps if a model for chats ended a text that is not one."""
  is_over = shown and shown[-1].stop_reason is specsample.StopReason.EOS
  if is_over and shown[-1].stats.tokens == 1:
    note(
      'nothing was written: the model ended the text at once. It is for chats: '
      'ask it with --chat'
    )


def metrics_text(last: stream.Chunk) -> str:
  """Returns the metrics of a generation, in three lines."""
  metrics = stream.metrics(last)
  return '\n'.join(
    [
      f'{_count(metrics["tokens"], "token")} in '
      f'{_count(metrics["rounds"], "round")} '
      f'({metrics["tokens_per_round"]:.2f} per round){_drafts_text(last)}',
      f'first token after {_number(metrics["time_to_first_token"], ".2f")} s, '
      f'then {_number(metrics["tokens_per_second"], ".1f")} tokens per second '
      f'({_number(metrics["ms_per_token"], ".1f")} ms per token)',
      f'stopped by: {_reason(last)}',
    ]
  )


def turn_text(last: stream.Chunk, num_read: int) -> str:
  """Returns the metrics of an answer in a chat, in one line."""
  metrics = stream.metrics(last)
  drafts = ''
  if metrics['drafted']:
    drafts = f'; {metrics["kept"]} of {metrics["drafted"]} drafted tokens kept'
  return (
    f'({_count(num_read, "token")} read, {metrics["tokens"]} written, the '
    f'first after {_number(metrics["time_to_first_token"], ".2f")} s, then '
    f'{_number(metrics["tokens_per_second"], ".1f")} per second{drafts}; '
    f'stopped by: {_reason(last)})'
  )


def _drafts_text(last: stream.Chunk) -> str:
  stats = last.stats
  if len(stats.proposed) < 2:
    return ', without drafts'
  metrics = stream.metrics(last)
  num_plain = stats.proposed[0]
  num_drafting = stats.rounds - num_plain
  if not num_drafting:
    return ': no round drafted anything'
  plain = ''
  if num_plain:
    plain = f'; {_count(num_plain, "round")} drafted nothing'
  return (
    f': {metrics["drafted"]} drafted in {_count(num_drafting, "round")}, '
    f'{metrics["kept"]} kept{plain}'
  )


def _reason(last: stream.Chunk) -> str:
  if last.stop_reason == specsample.StopReason.RUNNING:
    return 'interruption'
  return last.stop_reason.name.lower()


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def _number(value: Any, form: str) -> str:
  """Formats a number, or returns '-' for None."""
  return '-' if value is None else f'{value:{form}}'
