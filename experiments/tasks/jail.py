"""Runs one program behind limits; `sandbox.py` starts this as a process.

Reads JSON from standard input: the program, the limits, and a secret by which
its answer on standard output can be told from what the program may write there.
Standard library only, and nothing of the package: the process begins without a
path to it.
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
  """Walls itself in, then runs the program in this process."""
  task = json.load(sys.stdin)
  answer = _Answer(os.dup(1), task['secret'])
  # The program finds its input at an end, and what it prints goes nowhere.
  nowhere = os.open(os.devnull, os.O_RDWR)
  for descriptor in range(3):
    os.dup2(nowhere, descriptor)
  try:
    _limit(task['limits'])
    _wall_in(task['parent'])
  # Whatever is wrong with the walls, nothing runs without them.
  except Exception as error:
    answer.end('refused', str(error) or type(error).__name__)
  try:
    exec(compile(task['program'], 'program', 'exec'), {})
  # Also SystemExit: a program that leaves early has not passed its tests.
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
  # Loaded by its path, as the package cannot be imported from here.
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
  raise OSError('the filter of system calls leaves the network open')


class _Answer:
  """Says how it ended, once."""

  def __init__(self, descriptor: int, secret: str):
    """To an open file."""
    self._descriptor = descriptor
    self._secret = secret

  def end(self, kind: str, reason: str) -> NoReturn:
    """Answers and ends the process."""
    record = {'secret': self._secret, 'kind': kind, 'reason': reason}
    os.write(self._descriptor, json.dumps(record).encode())
    # Nothing that the program left behind, such as exit handlers, gets a turn.
    os._exit(0)


if __name__ == '__main__':
  main()
