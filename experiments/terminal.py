"""A generation as it appears: the text, or the rounds it came in."""

from collections.abc import Iterable
import io
import sys
from typing import Protocol

import rich.console
import rich.text

from experiments import evaluation_report
from experiments import generation
import specsample
from specsample import text as text_lib

_STYLES = {
  specsample.Origin.ACCEPTED: 'green',
  specsample.Origin.CORRECTION: 'bold red',
  specsample.Origin.BONUS: 'bold blue',
}
_NAMES = {
  specsample.Origin.ACCEPTED: 'accepted draft',
  specsample.Origin.CORRECTION: 'correction',
  specsample.Origin.BONUS: 'bonus',
}


class View(Protocol):
  """Something that shows rounds as they come."""

  def show(self, shown: generation.Round) -> None:
    """Shows one more round."""

  def close(self) -> None:
    """Shows what was held back."""


def show(
  rounds: Iterable[generation.Round],
  tokenizer: text_lib.Tokenizer,
  by_round: bool,
) -> list[generation.Round]:
  """Shows rounds as they come, then the metrics; returns the rounds.

  Interrupted, it still gives the metrics so far.
  """
  shown: list[generation.Round] = []
  views = _views(tokenizer, by_round)
  try:
    for one in rounds:
      shown.append(one)
      for view in views:
        view.show(one)
  finally:
    for view in views:
      view.close()
    if shown:
      print(metrics_text(shown[-1]), file=sys.stderr)
  return shown


def metrics_text(last: generation.Round) -> str:
  """What a generation brought, in two lines."""
  metrics = generation.metrics(last)
  kept = [
    '-' if share is None else f'{share:.2f}'
    for share in metrics['acceptance_by_position']
  ]
  accepted = ''
  if kept:
    accepted = (
      f', {metrics["plain_rounds"]:.0%} of the rounds without a draft; '
      f'accepted by position {" ".join(kept)}'
    )
  return (
    f'\n{metrics["tokens"]} tokens in {metrics["rounds"]} rounds, '
    f'{metrics["tokens_per_round"]:.2f} a round{accepted}\n'
    f'{metrics["seconds"]:.2f} s, '
    f'{evaluation_report.number(metrics["ms_per_token"], ".1f")} ms a token '
    f'(prefill left out); stopped by: {metrics["stop_reason"]}'
  )


def _views(tokenizer: text_lib.Tokenizer, by_round: bool) -> list[View]:
  """What to show where: standard output that is no terminal gets text alone."""
  shown: list[View] = []
  is_terminal = sys.stdout.isatty()
  if not (is_terminal and by_round):
    shown.append(TextView(tokenizer))
  if by_round:
    console = rich.console.Console(stderr=not is_terminal)
    shown.append(RoundView(tokenizer, console))
  return shown


class TextView:
  """The text on standard output, unwrapped and uncoloured."""

  def __init__(self, tokenizer: text_lib.Tokenizer):
    """`tokenizer` turns the tokens into text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='replace')
    self._stream = text_lib.TextStream(tokenizer)

  def show(self, shown: generation.Round) -> None:
    """See `View`."""
    self._write(self._stream.push(shown.tokens))

  def close(self) -> None:
    """See `View`; a newline ends the text."""
    self._write(self._stream.finish() + '\n')

  def _write(self, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class RoundView:
  """A line a round, each token coloured by its origin.

  After Figure 1 of Leviathan et al., 2211.17192.
  """

  def __init__(
    self, tokenizer: text_lib.Tokenizer, console: rich.console.Console
  ):
    """Prints the legend."""
    self._stream = text_lib.TextStream(tokenizer)
    self._console = console
    legend = [rich.text.Text(_NAMES[o], _STYLES[o]) for o in _STYLES]
    self._console.print(
      rich.text.Text('round (drafts kept): ') + _join(legend, ', ')
    )

  def show(self, shown: generation.Round) -> None:
    """See `View`."""
    line = rich.text.Text()
    for token, origin in zip(shown.tokens, shown.origins, strict=True):
      line.append(self._text([token]), _STYLES[origin])
    kept = shown.origins.count(specsample.Origin.ACCEPTED)
    self._print(f'{shown.stats.rounds:4} ({kept}) ', line)

  def close(self) -> None:
    """See `View`."""
    rest = self._stream.finish()
    if rest:
      self._print(' ' * 9, rich.text.Text(rest))

  def _text(self, tokens: Iterable[int]) -> str:
    return self._stream.push(tokens).replace('\n', '⏎')

  def _print(self, head: str, line: rich.text.Text) -> None:
    text = rich.text.Text.assemble((head, 'dim'), line)
    self._console.print(text, soft_wrap=True)


def _join(parts, separator):
  return rich.text.Text(separator).join(parts)
