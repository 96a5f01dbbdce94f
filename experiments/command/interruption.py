"""Ctrl-C, heard once and wherever it lands.

Python raises KeyboardInterrupt in whatever runs at that moment. In another
library's destructor it is swallowed, so the next step of the progress raises it
again. Later signals are ignored: they would hit a process that is ending.
"""

import os
import signal
import sys
import threading

_heard = threading.Event()


def listen() -> None:
  """Handles SIGINT from now on, unless it is ignored, as under nohup."""
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, _hear)


def _hear(number, frame) -> None:
  del number, frame
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  _heard.set()
  raise KeyboardInterrupt


def check() -> None:
  """Raises KeyboardInterrupt if there was one."""
  if _heard.is_set():
    raise KeyboardInterrupt


def end(code: int) -> None:
  """Ends the process without the destructors of libraries, which may crash."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
