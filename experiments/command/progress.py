"""The progress of a command, shown on standard error."""

from collections.abc import Callable, Iterator
import contextlib
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
# The same, if the lines are limited in number.
_LONGEST_SILENCE = 300
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
  """Shows a progress bar of `total` steps; without a terminal, ten lines.

  Yields a function to call with a step's description before the step begins.
  """
  with meter(total, 0, '', lines=10) as move:
    begun = 0

    def step(description: str) -> None:
      nonlocal begun
      move(begun, description)
      begun += 1

    yield step


@contextlib.contextmanager
def meter(
  total: int, done: int, unit: str, *, lines: int | None = None
) -> Iterator[Meter]:
  """Shows a bar of `total` units with their rate and the time left.

  Of several processes only the first one shows it. Without a terminal, it
  prints a line every 30 seconds or, with `lines`, so many in all and at least
  one in five minutes. `done` units are done when the run begins; the rate is
  measured from the first units that this run finishes, because the time before
  that is compilation.
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
  seconds = _LINE_SECONDS if lines is None else _LONGEST_SILENCE
  next_line = time.monotonic()
  next_done = 0.0
  with shown:
    task = shown.add_task('', total=total, completed=done, unit=unit)

    def move(done: int, description: str) -> None:
      nonlocal next_line, next_done
      cli.check_interrupted()
      shown.update(task, completed=done, description=description)
      is_due = time.monotonic() >= next_line
      if lines is not None and done >= next_done:
        is_due, next_done = True, done + total / lines
      if not is_terminal and is_due:
        next_line = time.monotonic() + seconds
        print(_line(shown.tasks[task]), file=sys.stderr, flush=True)

    yield move


class _Text(rich.progress.ProgressColumn):
  """The text beside the bar."""

  def render(self, task: rich.progress.Task) -> rich.text.Text:
    """Returns the text, in which nothing is taken for markup."""
    return rich.text.Text(_line(task), no_wrap=True, overflow='ellipsis')


def _line(task: rich.progress.Task) -> str:
  """Returns '400/900 tokens, 20 tokens/s, 25s left, what is under way'."""
  unit = task.fields['unit']
  parts = [f'{task.completed:,.0f}/{task.total:,.0f} {unit}'.rstrip()]
  speed, seconds = task.speed, task.time_remaining
  if unit and speed:
    parts.append(f'{speed:,.{0 if speed >= 10 else 2}f} {unit}/s')
  if seconds:
    parts.append(f'{_duration(round(seconds))} left')
  return ', '.join([*parts, task.description])


def _duration(seconds: int) -> str:
  """Returns '25s', '2m30s' or '1h05m'."""
  minutes, rest = divmod(seconds, 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}h{minutes:02}m'
  return f'{minutes}m{rest:02}s' if minutes else f'{rest}s'
