"""The environment of a measurement, which every result file records."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import jax

from experiments.command import cli
from specsample import files
from specsample import host

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = (
  *('specsample', 'jax', 'jaxlib', 'flax', 'numpy'),
  *('optax', 'orbax-checkpoint'),
)


def set_up() -> None:
  """Configures JAX, before a command decodes or trains.

  Compiled programs are kept between runs if compiling them took at least a
  tenth of a second, or JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS. They are
  kept in the folder that JAX_COMPILATION_CACHE_DIR names, which may be in a
  bucket (gs://) for all hosts to read, or else in the user's cache folder.
  Products of float32 use full precision, unless JAX_DEFAULT_MATMUL_PRECISION
  says otherwise.

  If JAX_PLATFORMS names only devices that are not here, the command ends with
  one line and exit code 2.
  """
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  own = str(pathlib.Path(home) / 'specsample' / 'jax')
  folder = os.environ.get('JAX_COMPILATION_CACHE_DIR') or own
  with cli.bad_input():
    _check_platforms()
    files.at(folder)
  jax.config.update('jax_compilation_cache_dir', folder)
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
  # By default a TPU would round factors to bfloat16, and a GPU to TF32, which
  # changes results more than the shape of a pass may. Products of bfloat16 stay
  # as they are.
  if 'JAX_DEFAULT_MATMUL_PRECISION' not in os.environ:
    jax.config.update('jax_default_matmul_precision', 'highest')


def _check_platforms() -> None:
  """Raises ValueError if JAX has none of the devices that it was asked for."""
  platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
  if platforms in (None, '', 'cpu'):  # which every machine has
    return
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    reason = str(error).partition(' (set JAX_PLATFORMS')[0].rstrip('.')
    raise ValueError(
      f'JAX_PLATFORMS={platforms}: JAX finds no such device '
      f'({reason or "its plugin is not installed"}): install what JAX needs '
      'for it, or leave JAX_PLATFORMS out'
    ) from error


def hardware() -> dict[str, Any]:
  """Returns the devices that computed, and the machine of this process."""
  devices = jax.devices()
  return {
    'platform': devices[0].platform,
    'device': devices[0].device_kind,
    'device_count': len(devices),
    'process_count': jax.process_count(),
    'matmul_precision': jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    'cpu': _cpu_name(),
    'cpu_cores': host.num_cores(),
    'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
  }


def git_commit() -> str | None:
  """Returns the commit of the code, plus '-dirty' if files differ from it."""
  git = lambda *arguments: subprocess.check_output(
    ['git', '-C', str(_ROOT), *arguments], stderr=subprocess.DEVNULL, text=True
  ).strip()
  try:
    is_dirty = git('status', '--porcelain')
    return git('rev-parse', 'HEAD') + ('-dirty' if is_dirty else '')
  except (OSError, subprocess.CalledProcessError):  # no git, or no commit
    return None


def source() -> str:
  """Returns a digest of the library's and the experiments' code."""
  return host.source(pathlib.Path(host.__file__).parent, _ROOT / 'experiments')


def source_beside(component: Any) -> dict[str, str]:
  """Returns digests of a component's modules outside both packages, by name.

  A drafter or rule that a user wrote is in neither package. A component is a
  dataclass, searched with what its fields hold, or a tuple or list of such.
  """
  found: dict[str, str] = {}
  if isinstance(component, (tuple, list)):
    for item in component:
      found |= source_beside(item)
  if not dataclasses.is_dataclass(component):
    return found
  for field in dataclasses.fields(component):
    found |= source_beside(getattr(component, field.name))
  name = type(component).__module__
  path = getattr(sys.modules.get(name), '__file__', None)
  if path and name.partition('.')[0] not in ('specsample', 'experiments'):
    found[name] = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
  return found


def identity() -> dict[str, Any]:
  """Returns what all parts of a resumed run must have in common.

  It has the code instead of the commit, which also changes with files beside
  the code, such as results.
  """
  return {'code': source(), **_machine()}


def describe() -> dict[str, Any]:
  """Returns the fields of result files that say how a number was measured."""
  return {
    **_machine(),
    'git_commit': git_commit(),
    'command': shlex.join(['python', *sys.orig_argv[1:]]),
  }


def _machine() -> dict[str, Any]:
  packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    'hardware': hardware(),
    'versions': {'python': platform.python_version()} | packages,
    # The environment variables that change how XLA compiles.
    'compiler_flags': {
      name: os.environ[name]
      for name in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
      if os.environ.get(name)
    },
  }


def _cpu_name() -> str:
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    lines = []
  names = [line.partition(':')[2] for line in lines if 'model name' in line]
  return names[0].strip() if names else platform.processor()
