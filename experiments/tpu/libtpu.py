"""The compiler for TPUs: where it is, how JAX starts for it, its topologies.

Where libtpu is installed, every start of JAX loads it and warns that there is
no TPU. So it has a folder of its own, which only `compile_tpu` looks into.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import sys

import jax

from specsample.cost import chips

# JAX looks for no TPU, and several processes may compile at once.
_VARIABLES: Mapping[str, str] = {
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_ACCELERATOR_TYPE': 'v4-8',
  'TPU_LOG_DIR': 'disabled',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
}


@dataclasses.dataclass(frozen=True)
class Tpu:
  """What libtpu and JAX need to know of a chip of `chips.CHIPS`."""

  example: str  # the shape of one of its topologies
  # Options that JAX needs besides a topology's name.
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)


TPUS: Mapping[str, Tpu] = {
  # Makes both cores of a chip one device; by default, each core is a device.
  'v4': Tpu('2x2x4', {'chip_config_name': 'megacore'}),
  'v5e': Tpu('4x4'),
  'v5p': Tpu('2x2x4'),
  'v6e': Tpu('4x4'),
  'tpu7x': Tpu('2x2x1'),
}


def parse(topology: str) -> tuple[Tpu, chips.Chip]:
  """Returns the TPU and chip of a topology as JAX writes it, 'v4:2x2x4'."""
  name, _, shape = topology.partition(':')
  tpu = TPUS.get(name)
  if tpu is None and name in chips.CHIPS:
    raise ValueError(
      f'{topology!r} is not a TPU, and only the TPU compiler runs without its '
      f'device: give one of {examples()}'
    )
  if tpu is None:
    raise ValueError(
      f'{topology!r} is not a topology: give a chip and how many of them there '
      f'are along each axis, such as {examples()}'
    )
  num_axes = tpu.example.count('x') + 1
  sizes = shape.split('x')
  if len(sizes) != num_axes or not all(map(str.isdecimal, sizes)):
    raise ValueError(
      f'{topology!r} is not a topology: {name} has {num_axes} axes, such as '
      f'{name}:{tpu.example}'
    )
  return tpu, chips.CHIPS[name]


def examples() -> str:
  """Returns an example topology for each TPU, separated by commas."""
  return ', '.join(f'{name}:{tpu.example}' for name, tpu in TPUS.items())


def check(topologies: Sequence[str]) -> None:
  """Raises ValueError if no topology is given, or if `parse` refuses one."""
  if not topologies:
    raise ValueError(
      f'no topology is given: name one with --topology, such as {examples()}'
    )
  for topology in topologies:
    parse(topology)


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
