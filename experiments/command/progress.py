"""The progress of a command, shown on standard error."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import datetime
import sys
import time

import rich.console
import rich.progress

from experiments.command import distributed
from experiments.command import interruption

Step = Callable[[str], None]
# The number of steps of a bar before it shows the time left.
_FEWEST_STEPS = 5
Bar = Callable[[int], contextlib.AbstractContextManager[Step]]


@contextlib.contextmanager
def bar(total: int) -> Iterator[Step]:
  """Shows a progress bar of `total` steps; without a terminal, a line per step.

  Of several processes only the first one shows it. Yields a function to call
  with a step's description before the step begins.
  """
  if not distributed.is_first():
    yield lambda _: None
    return
  if not sys.stderr.isatty():
    yield _printer(total)
    return
  shown = rich.progress.Progress(
    rich.progress.BarColumn(bar_width=24),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    rich.progress.TextColumn('{task.description}', markup=False),
    console=rich.console.Console(stderr=True),
    transient=True,
  )
  left = _left(total)
  with shown:
    task = shown.add_task('', total=total)
    begun = 0

    def step(description: str) -> None:
      nonlocal begun
      interruption.check()
      text = f'{description}{left(begun)}'
      shown.update(task, completed=begun, description=text)
      begun += 1

    yield step


def _printer(total: int) -> Step:
  begun = 0
  left = _left(total)

  def step(description: str) -> None:
    nonlocal begun
    interruption.check()
    line = f'[{begun + 1}/{total}] {description}{left(begun)}'
    print(line, file=sys.stderr, flush=True)
    begun += 1

  return step


def _left(total: int) -> Callable[[int], str]:
  """Returns a function that says how long the rest will take.

  The function takes the number of steps done, of `total`, and assumes that all
  of them take equally long. During the first few it says nothing.
  """
  begin = time.monotonic()

  def left(done: int) -> str:
    if done < _FEWEST_STEPS:
      return ''
    seconds = (time.monotonic() - begin) / done * (total - done)
    return f' ({_clock(seconds)} left)'

  return left


def _clock(seconds: float) -> str:
  return str(datetime.timedelta(seconds=round(seconds)))


# Takes the number of units done so far, and what is under way.
Meter = Callable[[int, str], None]
# Seconds between two lines if there is no terminal.
_LINE_SECONDS = 30
# The rate is measured over this many of the last seconds.
_RATE_SECONDS = 120


@contextlib.contextmanager
def meter(total: int, done: int, unit: str) -> Iterator[Meter]:
  """Shows a bar of `total` units with their rate and the time left.

  Without a terminal, it prints a line now and then. `done` units are done when
  the run begins; the rate is measured from the first units that this run
  finishes, because the time before that is compilation.
  """
  next_line = time.monotonic()
  before = done
  known: collections.deque[tuple[float, int]] = collections.deque()

  def rate_at(done: int) -> float:
    now = time.monotonic()
    if done > before:
      known.append((now, done))
    while len(known) > 2 and known[0][0] < now - _RATE_SECONDS:
      known.popleft()
    if not known or known[0][0] == now:
      return 0.0
    then, first = known[0]
    return (done - first) / (now - then)

  def describe(done: int, description: str) -> str:
    interruption.check()
    rate = rate_at(done)
    parts = [f'{done:,}/{total:,} {unit}']
    if rate > 0:
      left = _clock(max(total - done, 0) / rate)
      speed = f'{rate:,.0f}' if rate >= 10 else f'{rate:.2f}'
      parts += [f'{speed} {unit}/s', f'{left} left']
    return ', '.join([*parts, description])

  if not distributed.is_first():
    yield lambda _, __: None
    return
  if not sys.stderr.isatty():

    def line(done: int, description: str) -> None:
      nonlocal next_line
      if time.monotonic() >= next_line:
        next_line = time.monotonic() + _LINE_SECONDS
        print(describe(done, description), file=sys.stderr, flush=True)

    yield line
    return
  shown = rich.progress.Progress(
    rich.progress.BarColumn(bar_width=24),
    rich.progress.TextColumn('{task.description}', markup=False),
    console=rich.console.Console(stderr=True),
    transient=True,
  )
  with shown:
    task = shown.add_task('', total=total)

    def move(done: int, description: str) -> None:
      text = describe(done, description)
      shown.update(task, completed=done, description=text)

    yield move
