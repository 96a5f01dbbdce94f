"""Runs generated code where it can do nothing but compute.

Each program has a process of its own, which gives up all system calls that a
computation does without before the program begins (`system_calls.py`): it
cannot start a process or thread, reach the network, signal, or write, create or
remove a file. It has little memory and time, no environment, no input, an empty
folder to be in, what it prints is dropped, and it ends with this process. Only
Linux can do that; where it cannot be done nothing is run, since code that a
model wrote may do anything.

What remains: it can read the files that you can read, though nothing of them
gets out, and it runs in one interpreter with its tests. A program that sets out
to cheat could pass them; one that ends early or prints success does not.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import json
import math
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile

import gin

from experiments.command import environment

_JAIL = pathlib.Path(__file__).with_name('jail.py')
# What -I does, but for leaving out PYTHONHASHSEED, which is in the environment
# that we give. And no compiled files are written.
_PYTHON = (sys.executable, '-s', '-P', '-B')
# Where some installations of Python find themselves.
_KEPT = ('LD_LIBRARY_PATH',)
_MAX_ANSWER = 4096
# With less an interpreter does not begin, or its answer has no room.
_LEAST = {
  'seconds': 1,
  'clock_seconds': 1,
  'memory_bytes': 2**26,
  'file_bytes': _MAX_ANSWER,
  'open_files': 8,
}


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What a program may use.

  Raises:
    ValueError: a limit that no program could keep, or that is no whole number,
      which all but `clock_seconds` have to be.
  """

  seconds: int = 3  # of the processor
  clock_seconds: float = 15  # others use the processor too
  memory_bytes: int = 2**30  # of addresses
  file_bytes: int = 2**20
  open_files: int = 32

  def __post_init__(self):
    for name, value in vars(self).items():
      is_whole = name != 'clock_seconds'
      types = (int,) if is_whole else (int, float)
      if type(value) not in types or not _LEAST[name] <= value < math.inf:
        raise ValueError(
          f'Limits.{name} = {value!r}: give a {"whole " * is_whole}number, '
          f'{_LEAST[name]} or more'
        )

  def of_process(self) -> dict[str, int]:
    """By the names of setrlimit(2)."""
    return {
      'CPU': self.seconds,
      'AS': self.memory_bytes,
      'FSIZE': self.file_bytes,
      'NOFILE': self.open_files,
    }


DEFAULT = Limits()


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a program ended."""

  passed: bool
  reason: str  # why it did not: the name of an exception, 'out of time', ...


def refusal(limits: Limits = DEFAULT) -> str | None:
  """Why no program can be run here within limits; None where it can be."""
  kind, reason = _run('import collections', limits)
  if kind == 'failed':
    return f'a program that does nothing fails ({reason}) within {limits}'
  return reason if kind == 'refused' else None


def run(program: str, limits: Limits = DEFAULT) -> Outcome:
  """Runs Python source to its end, or to that of its limits.

  Raises:
    ValueError: it cannot be walled in here, and was not run.
  """
  kind, reason = _run(program, limits)
  if kind == 'refused':
    raise ValueError(
      f'generated code is not run here: {reason}: leave out '
      '--allow_code_execution, or score on Linux (x86-64 or aarch64)'
    )
  return Outcome(kind == 'passed', reason)


def run_all(programs: Sequence[str], limits: Limits = DEFAULT) -> list[Outcome]:
  """`run`, as many at once as there are processors for this process."""
  # Of others it may not use, programs would run out of time.
  with futures.ThreadPoolExecutor(environment.num_cores()) as pool:
    return list(pool.map(lambda program: run(program, limits), programs))


def _run(program: str, limits: Limits) -> tuple[str, str]:
  """'passed', 'failed' or 'refused', and why."""
  secret = secrets.token_hex(16)
  task = {
    'program': program,
    'secret': secret,
    'parent': os.getpid(),
    'limits': limits.of_process(),
  }
  kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
  with (
    tempfile.TemporaryDirectory(prefix='specsample-') as folder,
    # A file, whose size is limited, where a pipe could be filled for ever.
    tempfile.TemporaryFile() as answer,
  ):
    try:
      # Killed when the time is up or we are interrupted. It has no children.
      ended = subprocess.run(
        [*_PYTHON, str(_JAIL)],
        input=json.dumps(task).encode(),
        stdout=answer,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        # Sets of strings have the same order each time.
        env={'PYTHONHASHSEED': '0', 'OPENBLAS_NUM_THREADS': '1', **kept},
        start_new_session=True,
        timeout=limits.clock_seconds,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return 'failed', 'out of time'
    answer.seek(0)
    written = answer.read(_MAX_ANSWER)
  try:
    record = json.loads(written)
    if record['secret'] == secret:
      return record['kind'], record['reason']
  except (ValueError, TypeError, LookupError):
    pass  # cut short, or written by the program
  return 'failed', f'exit {ended.returncode}'
