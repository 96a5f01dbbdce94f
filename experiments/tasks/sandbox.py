"""Runs generated code where it can do nothing but compute.

Each program has a process of its own. Before the program begins, the process
gives up all system calls that a computation does not need (`jail.py`): it
cannot start a process or thread, reach the network, send a signal, or write,
create or remove a file. It has little memory and time, no environment, no input
and an empty working directory. What it prints is discarded, and it ends with
this process. Only Linux can do that; elsewhere nothing is run, because code
that a model wrote may do anything.

Two gaps remain. The program can read the files that you can read, although
nothing of them gets out; and it shares an interpreter with its tests, so a
program that sets out to cheat could pass them. A program that ends early or
prints success does not.
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
from typing import Annotated

import gin

from specsample import host
from specsample import settings

_JAIL = pathlib.Path(__file__).with_name('jail.py')
# Like -I, except that PYTHONHASHSEED, which we set in the environment, applies.
# No compiled files are written.
_PYTHON = (sys.executable, '-s', '-P', '-B')
# Some installations of Python need it to find their own libraries.
_KEPT = ('LD_LIBRARY_PATH',)
_MAX_ANSWER = 4096
_Seconds = settings.rule(lambda x: 1 <= x < math.inf, 'a number, 1 or more')


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(settings.Settings):
  """The resources that a program may use.

  With less, an interpreter does not start, or its answer does not fit.
  """

  seconds: settings.Count = 3  # CPU time
  # Wall-clock time; others use the processor too.
  clock_seconds: Annotated[float, _Seconds] = 15
  # Address space.
  memory_bytes: Annotated[int, settings.at_least(2**26)] = 2**30
  file_bytes: Annotated[int, settings.at_least(_MAX_ANSWER)] = 2**20
  open_files: Annotated[int, settings.at_least(8)] = 32

  def of_process(self) -> dict[str, int]:
    """Returns the limits by their names in setrlimit(2)."""
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
  """Returns why no program can be run here within limits; None if one can."""
  kind, reason = _run('import collections', limits)
  if kind == 'failed':
    return f'a program that does nothing fails ({reason}) within {limits}'
  return reason if kind == 'refused' else None


def run(program: str, limits: Limits = DEFAULT) -> Outcome:
  """Runs Python source until it ends or reaches a limit."""
  kind, reason = _run(program, limits)
  if kind == 'refused':
    raise ValueError(
      f'generated code is not run here: {reason}: leave out '
      '--allow_code_execution, or score on Linux (x86-64 or aarch64)'
    )
  return Outcome(kind == 'passed', reason)


def run_all(programs: Sequence[str], limits: Limits = DEFAULT) -> list[Outcome]:
  """Runs programs, as many at once as this process may use processors."""
  # Counting processors that it may not use would make programs run out of time.
  with futures.ThreadPoolExecutor(host.num_cores()) as pool:
    return list(pool.map(lambda program: run(program, limits), programs))


def _run(program: str, limits: Limits) -> tuple[str, str]:
  """Returns 'passed', 'failed' or 'refused', and why."""
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
    # A file, because its size is limited; a pipe could be filled for ever.
    tempfile.TemporaryFile() as answer,
  ):
    try:
      # It is killed when time is up or we are interrupted. It has no children.
      ended = subprocess.run(
        [*_PYTHON, str(_JAIL)],
        input=json.dumps(task).encode(),
        stdout=answer,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        # Gives sets of strings the same order each time.
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
