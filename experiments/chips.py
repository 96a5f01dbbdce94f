"""TPUs, as a roofline needs them: the figures of one device of JAX.

A device is a chip: on v4 and v5p its two cores together. Of TPU7x each core is
one, and has half of what the chip has.

Sources: the tables at docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x;
for v4, Jouppi et al., 2304.01433. What the inter-chip links carry is taken in
one direction, all links of a chip together: half of the tables' bidirectional
bandwidth, and six links of 50 GB/s on v4.
"""

from collections.abc import Mapping, Sequence
import dataclasses

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device; bandwidths in bytes a second."""

  hbm_bytes: int
  hbm_bandwidth: float
  flops: float  # a second, of bfloat16 products
  link_bandwidth: float  # between chips
  example: str  # a shape of its topologies
  # What JAX has to know beside a topology's name.
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def seconds(self, flops: float, memory: float, links: float) -> float:
    """The least time for so many operations, and bytes each way.

    That is all of them at once at their full speeds (the roofline): what waits
    for a message to arrive is left out, however short the message.
    """
    return max(
      flops / self.flops,
      memory / self.hbm_bandwidth,
      links / self.link_bandwidth,
    )


CHIPS: Mapping[str, Chip] = {
  'v4': Chip(
    hbm_bytes=32 * _GIB,
    hbm_bandwidth=1228e9,
    flops=275e12,
    link_bandwidth=300e9,
    example='2x2x4',
    # Both cores of a chip as one device; else each is one, with half of it.
    options={'chip_config_name': 'megacore'},
  ),
  'v5e': Chip(
    hbm_bytes=16 * _GIB,
    hbm_bandwidth=819e9,
    flops=197e12,
    link_bandwidth=200e9,
    example='4x4',
  ),
  'v5p': Chip(
    hbm_bytes=95 * _GIB,
    hbm_bandwidth=2765e9,
    flops=459e12,
    link_bandwidth=600e9,
    example='2x2x4',
  ),
  'v6e': Chip(
    hbm_bytes=32 * _GIB,
    hbm_bandwidth=1638e9,
    flops=918e12,
    link_bandwidth=400e9,
    example='4x4',
  ),
  'tpu7x': Chip(
    hbm_bytes=96 * _GIB,
    hbm_bandwidth=3690e9,
    flops=1153.5e12,
    link_bandwidth=300e9,
    example='2x2x1',
  ),
}


def of(topology: str) -> Chip:
  """The chip of a topology as JAX writes it, 'v4:2x2x4'.

  Raises:
    ValueError: there is no such chip, or its chips lie in another shape.
  """
  name, _, shape = topology.partition(':')
  chip = CHIPS.get(name)
  if chip is None:
    raise ValueError(
      f'{topology!r} is no topology: give a chip and how many of them there '
      f'are along each axis, such as {examples()}'
    )
  num_axes = chip.example.count('x') + 1
  sizes = shape.split('x')
  if len(sizes) != num_axes or not all(map(str.isdecimal, sizes)):
    raise ValueError(
      f'{topology!r} is no topology: {name} has {num_axes} axes, such as '
      f'{name}:{chip.example}'
    )
  return chip


def examples() -> str:
  """A topology of each chip."""
  return ', '.join(f'{name}:{chip.example}' for name, chip in CHIPS.items())


def check(topologies: Sequence[str]) -> None:
  """Refuses no topologies, and what `of` does."""
  if not topologies:
    raise ValueError(
      f'no topology is given: name one with --topology, such as {examples()}'
    )
  for topology in topologies:
    of(topology)
