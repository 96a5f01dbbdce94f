"""Display of a generation: its text, plain or marked by origin."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import io
import os
import sys
from typing import Any, Protocol

import rich.console

from experiments.decoding import colouring
from experiments.decoding import generation
from experiments.decoding import round_view
import specsample
from specsample import text as text_lib


class View(Protocol):
  """A display of chunks as they come."""

  def show(self, shown: generation.Chunk) -> None:
    """Shows one more chunk."""

  def close(self) -> None:
    """Shows what was held back, and ends the line."""


@dataclasses.dataclass(frozen=True)
class Marking:
  """A display of what was drafted: a legend, and a view of each text."""

  print_legend: Callable[[rich.console.Console], None]
  view: Callable[[text_lib.Tokenizer, rich.console.Console], View]


BY_ORIGIN = Marking(colouring.print_legend, colouring.ColourView)
BY_ROUND = Marking(round_view.print_legend, round_view.RoundView)


def show(
  chunks: Iterable[generation.Chunk],
  tokenizer: text_lib.Tokenizer,
  marking: Marking | None,
  waits: str = '',
) -> list[generation.Chunk]:
  """Shows chunks as they come, then the metrics; returns the chunks.

  If it is interrupted, it still shows the metrics so far.

  Args:
    chunks: the chunks of a generation.
    tokenizer: turns their tokens into text.
    marking: how to show what was drafted, if at all.
    waits: text about the time before the prompt, see `waits_text`.
  """
  shown: list[generation.Chunk] = []
  if marking is not None:
    marking.print_legend(console())
  shown_by = views(tokenizer, marking)
  try:
    for one in chunks:
      shown.append(one)
      for view in shown_by:
        view.show(one)
  finally:
    for view in shown_by:
      view.close()
    if shown:
      note('\n' + metrics_text(shown[-1]) + waits)
  return shown


def views(
  tokenizer: text_lib.Tokenizer, marking: Marking | None
) -> Sequence[View]:
  """Returns the views of a generation, each with its own stream.

  If standard output is not a terminal, it gets the plain text and standard
  error the marked text. If both are the same file, only the marked text is
  written, so that no token appears twice.
  """
  shown: list[View] = []
  if marking is None or not (sys.stdout.isatty() or _streams_are_one()):
    shown.append(TextView(tokenizer))
  if marking is not None:
    shown.append(marking.view(tokenizer, console()))
  return shown


def _streams_are_one():
  """Returns whether standard output and standard error are one file or pipe."""
  try:
    out, err = (os.fstat(x.fileno()) for x in (sys.stdout, sys.stderr))
  except (OSError, ValueError):  # neither file nor pipe
    return False
  return os.path.samestat(out, err)


def console() -> rich.console.Console:
  """Returns the console for marked text: stderr if stdout is not a terminal."""
  return rich.console.Console(stderr=not sys.stdout.isatty())


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


def say_if_empty(shown: Sequence[generation.Chunk]) -> None:
  """Says what helps if a model for chats ended a text that is not one."""
  is_over = shown and shown[-1].stop_reason is specsample.StopReason.EOS
  if is_over and shown[-1].stats.tokens == 1:
    note(
      'nothing was written: the model ended the text at once. It is for chats: '
      'ask it with --chat'
    )


def metrics_text(last: generation.Chunk) -> str:
  """Returns the metrics of a generation, in three lines."""
  metrics = generation.metrics(last)
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


def turn_text(last: generation.Chunk, num_read: int) -> str:
  """Returns the metrics of an answer in a chat, in one line.

  Args:
    last: the last chunk of the answer.
    num_read: tokens that the target read before the first round.
  """
  metrics = generation.metrics(last)
  drafts = ''
  if metrics['drafted']:
    drafts = f'; {metrics["kept"]} of {metrics["drafted"]} drafted tokens kept'
  return (
    f'({_count(num_read, "token")} read, {metrics["tokens"]} written, the '
    f'first after {_number(metrics["time_to_first_token"], ".2f")} s, then '
    f'{_number(metrics["tokens_per_second"], ".1f")} per second{drafts}; '
    f'stopped by: {_reason(last)})'
  )


def waits_text(seconds: Mapping[str, float]) -> str:
  """Returns the times of the stages before the prompt, to follow the metrics.

  Args:
    seconds: the time of each stage, by its name.
  """
  times = ', '.join(f'{name} {value:.1f} s' for name, value in seconds.items())
  return f'; before the prompt: {times}' if times else ''


def _drafts_text(last: generation.Chunk) -> str:
  stats = last.stats
  if len(stats.proposed) < 2:
    return ', without drafts'
  metrics = generation.metrics(last)
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


def _reason(last: generation.Chunk) -> str:
  if last.stop_reason == specsample.StopReason.RUNNING:
    return 'interruption'
  return last.stop_reason.name.lower()


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def _number(value: Any, form: str) -> str:
  """Formats a number, or returns '-' for None."""
  return '-' if value is None else f'{value:{form}}'


class TextView:
  """A view that writes plain, unwrapped text to standard output."""

  def __init__(self, tokenizer: text_lib.Tokenizer):
    """Starts a view; `tokenizer` turns the tokens into text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='replace')
    self._stream = text_lib.TextStream(tokenizer)

  def show(self, shown: generation.Chunk) -> None:
    """See `View`."""
    self._write(self._stream.push(shown.tokens))

  def close(self) -> None:
    """See `View`; a newline ends the text."""
    self._write(self._stream.finish() + '\n')

  def _write(self, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
