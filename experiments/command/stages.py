"""Shows on standard error what a command does before its first output."""

from collections.abc import Iterator
import contextlib
import sys
import time
from typing import Protocol


class Stages(Protocol):
  """Shows one stage after another, and times them."""

  seconds: dict[str, float]  # of the stages that are over, by their names

  def begin(self, name: str, subject: str) -> None:
    """Ends the stage before and shows the next one, as 'loading MODEL ...'."""

  def end(self) -> None:
    """Ends the stage that is under way."""


class _Silent:
  """Times the stages and shows nothing."""

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
  """Prints a line per stage."""

  def show(self, text: str) -> None:
    """See `_Silent`."""
    print(text, file=sys.stderr, flush=True)


class _Status(_Silent):
  """Shows the stage in a line of the terminal that goes away at the end."""

  def __init__(self):
    super().__init__()
    # Imported where it is used: a pipe does not need it.
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
  """Shows stages until its end: one transient line, or a line per stage.

  Args:
    is_shown: False only times them, as all processes but the first one do.
  """
  stages: _Silent = _Silent()
  if is_shown:
    stages = _Status() if sys.stderr.isatty() else _Lines()
  try:
    yield stages
  finally:
    stages.end()
