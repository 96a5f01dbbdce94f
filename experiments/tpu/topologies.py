"""The TPUs that `compile_tpu` compiles for, and their topologies."""

from collections.abc import Mapping, Sequence
import dataclasses

from specsample.cost import chips


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
  """Returns what is known of a topology that is written as in JAX, 'v4:2x2x4'."""
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
