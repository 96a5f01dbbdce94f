"""Which step is under way, on standard error."""

from collections.abc import Callable, Iterator
import contextlib
import sys

import rich.console
import rich.progress

from experiments import distributed

Step = Callable[[str], None]
Bar = Callable[[int], contextlib.AbstractContextManager[Step]]


@contextlib.contextmanager
def bar(total: int) -> Iterator[Step]:
  """A progress bar of `total` steps; a line a step where there is no terminal.

  Of several processes only the first one shows it. Yields a function that is
  called with a step's description before it begins.
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
  with shown:
    task = shown.add_task('', total=total)
    begun = 0

    def step(description: str) -> None:
      nonlocal begun
      shown.update(task, completed=begun, description=description)
      begun += 1

    yield step


def _printer(total: int) -> Step:
  begun = 0

  def step(description: str) -> None:
    nonlocal begun
    begun += 1
    print(f'[{begun}/{total}] {description}', file=sys.stderr, flush=True)

  return step
