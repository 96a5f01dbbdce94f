"""Where libtpu, the TPU compiler, is, and how JAX starts for it.

Where libtpu is installed, every start of JAX loads it and warns that there is
no TPU. So it has a folder of its own, which only `compile_tpu` looks into.
"""

from collections.abc import Mapping
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import sys

import jax

# JAX looks for no TPU, and several processes may compile at once.
_VARIABLES: Mapping[str, str] = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_LOG_DIR': 'disabled',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


def set_up() -> None:
  """Configures JAX to compile only; called before anything is computed."""
  os.environ.update(_VARIABLES)
  jax.config.update('jax_platforms', 'cpu')
  # No cache hides how long a program takes to compile.
  jax.config.update('jax_enable_compilation_cache', False)


def find_libtpu() -> None:
  """Tells JAX where libtpu is."""
  if importlib.util.find_spec('libtpu') is not None:
    return
  requirement = _requirement()
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  name = re.sub(r'[^\w.]+', '-', requirement).strip('-.')
  folder = pathlib.Path(home) / 'specsample' / name
  library = folder / 'libtpu' / 'libtpu.so'
  if not library.is_file():
    pip = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--upgrade']
    command = shlex.join([*pip, f'--target={folder}', requirement])
    raise ValueError(
      'libtpu, the TPU compiler, is not installed (0.2 GB, for Linux on '
      f'x86-64): run `{command}`, then the same command again'
    )
  os.environ['TPU_LIBRARY_PATH'] = str(library)


def _requirement() -> str:
  """Returns this JAX version's libtpu requirement: 'libtpu==0.0.42.*'."""
  for line in importlib.metadata.requires('jax') or ():
    requirement, _, condition = line.partition(';')
    if requirement.startswith('libtpu') and 'tpu' in condition:
      return requirement.strip()
  return 'libtpu'
