"""A Python environment of its own for libtpu, the TPU compiler.

Where libtpu is installed, every start of JAX loads it and warns that there is
no TPU. So libtpu gets a virtual environment of its own in the user's cache
folder. That environment also sees everything in the one that calls it.
"""

from collections.abc import Mapping
import fcntl
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import IO

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Written last: if it is missing, an install was interrupted.
_MARK = 'installed'
# JAX looks for no TPU, several processes may compile at once, and no cache
# hides how long a program takes to compile.
_VARIABLES: Mapping[str, str] = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_ENABLE_COMPILATION_CACHE': 'false',
  'JAX_PLATFORMS': 'cpu',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_LOG_DIR': 'disabled',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


def enter(module: str) -> None:
  """Restarts as `python -m module`, with the same arguments, where libtpu is.

  Returns at once if this process already has libtpu and its settings. The first
  call installs libtpu, about 200 MB.

  Raises:
    ValueError: it cannot be installed.
  """
  has_libtpu = importlib.util.find_spec('libtpu') is not None
  if has_libtpu and _VARIABLES.items() <= os.environ.items():
    return
  python = sys.executable if has_libtpu else str(_installed())
  # The folder of this package, and everything that is installed here.
  paths = [str(_ROOT), *(path for path in sys.path if path)]
  environment = {
    **os.environ,
    **_VARIABLES,
    'PYTHONPATH': os.pathsep.join(dict.fromkeys(paths)),
  }
  sys.stdout.flush()
  os.execve(python, [python, '-m', module, *sys.argv[1:]], environment)


def _installed() -> pathlib.Path:
  """Returns the environment's interpreter; installs it if it is missing."""
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  folder = pathlib.Path(home) / 'specsample' / 'libtpu'
  python = folder / 'bin' / 'python'
  if not _is_current(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix('.lock'), 'w') as lock:
      _take(lock)
      # Another process may have installed it while this one waited.
      if not _is_current(folder):
        _install(folder, lock)
  return python


def _requirement() -> str:
  """Returns this JAX version's libtpu requirement: 'libtpu==0.0.42.*'."""
  for line in importlib.metadata.requires('jax') or ():
    requirement, _, condition = line.partition(';')
    if requirement.startswith('libtpu') and 'tpu' in condition:
      return requirement.strip()
  return 'libtpu'


def _wanted() -> str:
  return f'{_requirement()}\n{sys.version}\n{sys.base_prefix}\n'


def _is_current(folder: pathlib.Path) -> bool:
  """Returns whether an install for this Python and JAX was completed there."""
  mark = folder / _MARK
  return (
    mark.is_file()
    and mark.read_text() == _wanted()
    and any(folder.glob('lib/python*/site-packages/libtpu/libtpu.so'))
  )


def _install(folder: pathlib.Path, lock: IO[str]) -> None:
  requirement = _requirement()
  start = time.monotonic()
  print(
    f'installing {requirement} into {folder} (once) ... ',
    end='',
    file=sys.stderr,
    flush=True,
  )
  # Leftovers of an interrupted install.
  shutil.rmtree(folder)
  python = str(folder / 'bin' / 'python')
  pip = [sys.executable, '-m', 'pip', '--python', python, 'install']
  quietly = ['--quiet', '--no-input', '--disable-pip-version-check']
  try:
    _run([sys.executable, '-m', 'venv', '--without-pip', str(folder)], lock)
    _run([*pip, *quietly, '--no-deps', requirement], lock)
  except subprocess.CalledProcessError as error:
    shutil.rmtree(folder, ignore_errors=True)
    raise ValueError(
      f'failed: {_reason(error.stdout)}: the package index has libtpu for '
      'Linux on x86-64: make sure that pip can reach it, and run this again'
    ) from error
  (folder / _MARK).write_text(_wanted())
  print(f'{time.monotonic() - start:.0f} s', file=sys.stderr, flush=True)


def _run(command: list[str], lock: IO[str]) -> None:
  """Runs a step of the install, which keeps the lock if this process dies."""
  environment = {
    name: value for name, value in os.environ.items() if name != 'PYTHONPATH'
  }
  subprocess.run(
    command,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=True,
    pass_fds=(lock.fileno(),),
  )


def _reason(output: str) -> str:
  """Returns the last ERROR line of pip, or else the last line of the output."""
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  errors = [line for line in lines if line.startswith('ERROR')]
  return (errors or lines or ['no reason was given'])[-1]


def _take(lock: IO[str]) -> None:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    print(
      f'another process is installing libtpu ({lock.name}): waiting for it',
      file=sys.stderr,
      flush=True,
    )
    fcntl.flock(lock, fcntl.LOCK_EX)
