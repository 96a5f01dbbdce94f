"""Shows on standard error what a command does before its first output."""

from collections.abc import Iterator
import contextlib
import sys
import time
from typing import Any


class Stages:
  """One stage after another, each shown and timed."""

  def __init__(self, status: Any = None, *, is_shown: bool = True):
    """Begins without a stage.

    Args:
      status: the line of a terminal that shows the stages, rich's; None for a
        line each.
      is_shown: if False, stages are only timed.
    """
    self.seconds: dict[str, float] = {}  # of the stages that are over, by name
    self._status = status
    self._is_shown = is_shown
    self._name = ''
    self._start = 0.0

  def begin(self, name: str, subject: str) -> None:
    """Ends the previous stage and shows the next, as in 'loading MODEL ...'."""
    self.end()
    self._name, self._start = name, time.perf_counter()
    text = f'{name} {subject} ...'
    if self._status is not None:
      self._status.update(text)
      self._status.start()
    elif self._is_shown:
      print(text, file=sys.stderr, flush=True)

  def end(self) -> None:
    """Ends the stage that is under way; the line disappears."""
    if self._name:
      self.seconds[self._name] = time.perf_counter() - self._start
      self._name = ''
    if self._status is not None:
      self._status.stop()


@contextlib.contextmanager
def shown(is_shown: bool = True) -> Iterator[Stages]:
  """Shows stages until the context ends: in one transient line, or a line each.

  Args:
    is_shown: if False, only times them, as in all processes but the first.
  """
  status = None
  if is_shown and sys.stderr.isatty():
    # Imported lazily: output to a pipe does not need it.
    import rich.console  # noqa: PLC0415

    status = rich.console.Console(stderr=True).status('')
  stages = Stages(status, is_shown=is_shown)
  try:
    yield stages
  finally:
    stages.end()
