"""Shows on standard error what a command does before its first output."""

from collections.abc import Iterator
import contextlib
import sys
import time
from typing import Protocol


class Stages(Protocol):
  """A display of one stage after another, which also times them."""

  seconds: dict[str, float]  # of the stages that are over, by name

  def begin(self, name: str, subject: str) -> None:
    """Ends the previous stage and shows the next, as in 'loading MODEL ...'."""

  def end(self) -> None:
    """Ends the stage that is under way."""


class _Silent:
  """Stages that are timed but not shown."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._name = ''
    self._start = 0.0

  def begin(self, name: str, subject: str) -> None:
    """See `Stages`."""
    self.end()
    self._name, self._start = name, time.perf_counter()
    self.show(f'{name} {subject} ...')

  def end(self) -> None:
    """Ends the stage that is under way."""
    if self._name:
      self.seconds[self._name] = time.perf_counter() - self._start
      self._name = ''

  def show(self, text: str) -> None:
    """Shows what is under way."""


class _Lines(_Silent):
  """Stages that are printed, a line each."""

  def show(self, text: str) -> None:
    """See `_Silent`."""
    print(text, file=sys.stderr, flush=True)


class _Status(_Silent):
  """Stages in a line of the terminal that disappears at the end."""

  def __init__(self):
    super().__init__()
    # Imported lazily: output to a pipe does not need it.
    import rich.console  # noqa: PLC0415

    self._status = rich.console.Console(stderr=True).status('')
    self._is_shown = False

  def show(self, text: str) -> None:
    """See `_Silent`."""
    self._status.update(text)
    if not self._is_shown:
      self._is_shown = True
      self._status.start()

  def end(self) -> None:
    """See `_Silent`."""
    super().end()
    if self._is_shown:
      self._is_shown = False
      self._status.stop()


@contextlib.contextmanager
def shown(is_shown: bool = True) -> Iterator[Stages]:
  """Shows stages until the context ends: in one transient line, or a line each.

  Args:
    is_shown: if False, only times them, as in all processes but the first.
  """
  stages: _Silent = _Silent()
  if is_shown:
    stages = _Status() if sys.stderr.isatty() else _Lines()
  try:
    yield stages
  finally:
    stages.end()
