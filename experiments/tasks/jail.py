"""Runs one program within limits; `sandbox.py` starts this as a process.

Reads JSON from standard input: the program, the limits, and a secret that tells
this file's answer on standard output from what the program may write there. It
uses only the standard library and nothing of the package, which the process has
no path to.
"""

import importlib.util
import json
import os
import pathlib
import resource
import socket
import sys
from typing import NoReturn


def main() -> None:
  """Confines this process, then runs the program in it."""
  task = json.load(sys.stdin)
  answer = _Answer(os.dup(1), task['secret'])
  # The program's input is empty, and what it prints is discarded.
  nowhere = os.open(os.devnull, os.O_RDWR)
  for descriptor in range(3):
    os.dup2(nowhere, descriptor)
  try:
    _limit(task['limits'])
    _wall_in(task['parent'])
  # Whatever goes wrong here, nothing runs unconfined.
  except Exception as error:
    answer.end('refused', str(error) or type(error).__name__)
  try:
    exec(compile(task['program'], 'program', 'exec'), {})
  # Also SystemExit: a program that exits early has not passed its tests.
  except BaseException as error:
    answer.end('failed', type(error).__name__)
  answer.end('passed', '')


def _limit(limits: dict[str, int]) -> None:
  for name, value in {**limits, 'NPROC': 0, 'CORE': 0}.items():
    kind = getattr(resource, f'RLIMIT_{name}')
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
      value = min(value, ceiling)
    resource.setrlimit(kind, (value, value))


def _wall_in(parent: int) -> None:
  # Loaded by its path, because the package cannot be imported from here.
  path = pathlib.Path(__file__).with_name('system_calls.py')
  spec = importlib.util.spec_from_file_location('system_calls', path)
  assert spec is not None and spec.loader is not None
  system_calls = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(system_calls)
  system_calls.end_with(parent)
  system_calls.renounce()
  try:
    socket.socket()
  except OSError:
    return
  raise OSError('the system call filter leaves the network open')


class _Answer:
  """The answer of this process, which is written once."""

  def __init__(self, descriptor: int, secret: str):
    """Stores the open file to write to, and the secret."""
    self._descriptor = descriptor
    self._secret = secret

  def end(self, kind: str, reason: str) -> NoReturn:
    """Writes the answer and ends the process."""
    record = {'secret': self._secret, 'kind': kind, 'reason': reason}
    os.write(self._descriptor, json.dumps(record).encode())
    # Skips whatever the program left behind, such as exit handlers.
    os._exit(0)


if __name__ == '__main__':
  main()
