"""The progress of a command, shown on standard error."""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import sys
import time

import rich.console
import rich.progress
import rich.text

from experiments.command import cli
from experiments.command import distributed

# Takes what is about to begin.
Step = Callable[[str], None]
Bar = Callable[[int], contextlib.AbstractContextManager[Step]]
# Takes the number of units done so far, and what is under way.
Meter = Callable[[int, str], None]

# Seconds between two lines if there is no terminal.
_LINE_SECONDS = 30
# The rate is measured over this many of the last seconds.
_RATE_SECONDS = 600


class Stages(contextlib.AbstractContextManager):
  """What a command does before its first output: each stage shown and timed.

  A terminal shows it in one line that disappears; otherwise there is a line for
  each stage.

  Attributes:
    seconds: the time that each stage took which is over, by its name.
  """

  def __init__(self, is_shown: bool):
    """Begins without a stage; if not `is_shown`, stages are only timed."""
    self.seconds: dict[str, float] = {}
    self._is_shown = is_shown
    self._status = rich.console.Console(stderr=True).status('')
    self._name = ''
    self._start = 0.0

  def begin(self, name: str, subject: str) -> None:
    """Ends the previous stage and shows the next, as in 'loading MODEL ...'."""
    self.end()
    self._name, self._start = name, time.perf_counter()
    text = f'{name} {subject} ...'
    if self._is_shown and sys.stderr.isatty():
      self._status.update(text)
      self._status.start()
    elif self._is_shown:
      print(text, file=sys.stderr, flush=True)

  def end(self) -> None:
    """Ends the stage that is under way, if any; the line disappears."""
    if self._name:
      self.seconds[self._name] = time.perf_counter() - self._start
      self._name = ''
    self._status.stop()

  def __exit__(self, *_) -> None:
    """Ends the last stage."""
    self.end()


@contextlib.contextmanager
def bar(total: int) -> Iterator[Step]:
  """Shows a progress bar of `total` steps; without a terminal, a line per step.

  Yields a function to call with a step's description before the step begins.
  """
  with meter(total, 0, '', seconds=0) as move:
    begun = 0

    def step(description: str) -> None:
      nonlocal begun
      move(begun, description)
      begun += 1

    yield step


@contextlib.contextmanager
def meter(
  total: int, done: int, unit: str, *, seconds: float = _LINE_SECONDS
) -> Iterator[Meter]:
  """Shows a bar of `total` units with their rate and the time left.

  Of several processes only the first one shows it. Without a terminal, it
  prints a line when `seconds` have passed since the last one. `done` units are
  done when the run begins; the rate is measured from the first units that this
  run finishes, because the time before that is compilation.
  """
  if not distributed.is_first():
    yield lambda _, __: None
    return
  is_terminal = sys.stderr.isatty()
  shown = rich.progress.Progress(
    rich.progress.BarColumn(bar_width=24),
    _Text(),
    console=rich.console.Console(stderr=True),
    transient=True,
    disable=not is_terminal,
    speed_estimate_period=_RATE_SECONDS,
    get_time=time.monotonic,
  )
  next_line = time.monotonic()
  with shown:
    task = shown.add_task('', total=total, completed=done, unit=unit)

    def move(done: int, description: str) -> None:
      nonlocal next_line
      cli.check_interrupted()
      shown.update(task, completed=done, description=description)
      if not is_terminal and time.monotonic() >= next_line:
        next_line = time.monotonic() + seconds
        print(_line(shown.tasks[task]), file=sys.stderr, flush=True)

    yield move


class _Text(rich.progress.ProgressColumn):
  """The text beside the bar."""

  def render(self, task: rich.progress.Task) -> rich.text.Text:
    """Returns the text, in which nothing is taken for markup."""
    return rich.text.Text(_line(task), no_wrap=True, overflow='ellipsis')


def _line(task: rich.progress.Task) -> str:
  """Returns '400/900 tokens, 20 tokens/s, 0:00:25 left, what is under way'."""
  unit = task.fields['unit']
  parts = [f'{task.completed:,.0f}/{task.total:,.0f} {unit}'.rstrip()]
  speed, seconds = task.speed, task.time_remaining
  if unit and speed:
    parts.append(f'{speed:,.{0 if speed >= 10 else 2}f} {unit}/s')
  if seconds:
    parts.append(f'{datetime.timedelta(seconds=round(seconds))} left')
  return ', '.join([*parts, task.description])
