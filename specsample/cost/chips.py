"""Chips, described by the figures of one JAX device that a roofline needs.

A device is a chip: on TPU v4 and v5p, its two cores together. On TPU7x each
core is a device, with half of the chip's figures.

Sources: the tables at docs.cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x;
for v4, Jouppi et al., 2304.01433; NVIDIA's data sheets of H100 SXM and H200,
for products without sparsity. The bandwidth of the links between chips is in
one direction and for all links of a chip together: half of the tables'
bidirectional bandwidth, and six links of 50 GB/s on v4.
"""

from collections.abc import Mapping
import dataclasses

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device; bandwidths in bytes per second."""

  hbm_bytes: int
  hbm_bandwidth: float
  flops: float  # per second, of bfloat16 products
  link_bandwidth: float  # between chips
  devices_per_chip: int = 1

  def seconds(self, flops: float, memory: float, links: float) -> float:
    """Returns the least time for operations, memory traffic and messages.

    `memory` and `links` are in bytes. All three run at once and at full speed
    (the roofline): the latency of messages is left out, however short they are.
    """
    return max(
      flops / self.flops,
      memory / self.hbm_bandwidth,
      links / self.link_bandwidth,
    )


CHIPS: Mapping[str, Chip] = {
  'v4': Chip(
    hbm_bytes=32 * _GIB,
    hbm_bandwidth=1200e9,
    flops=275e12,
    link_bandwidth=300e9,
  ),
  'v5e': Chip(
    hbm_bytes=16 * _GIB,
    hbm_bandwidth=819e9,
    flops=197e12,
    link_bandwidth=200e9,
  ),
  'v5p': Chip(
    hbm_bytes=95 * _GIB,
    hbm_bandwidth=2765e9,
    flops=459e12,
    link_bandwidth=600e9,
  ),
  'v6e': Chip(
    hbm_bytes=32 * _GIB,
    hbm_bandwidth=1638e9,
    flops=918e12,
    link_bandwidth=400e9,
  ),
  'tpu7x': Chip(
    hbm_bytes=96 * _GIB,
    hbm_bandwidth=3690e9,
    flops=1153.5e12,
    link_bandwidth=300e9,
    devices_per_chip=2,
  ),
  'h100': Chip(
    hbm_bytes=80 * 10**9,
    hbm_bandwidth=3350e9,
    flops=989e12,
    link_bandwidth=450e9,
  ),
  'h200': Chip(
    hbm_bytes=141 * 10**9,
    hbm_bandwidth=4800e9,
    flops=989e12,
    link_bandwidth=450e9,
  ),
}
# As `jax.Device.device_kind` names them.
_KINDS: Mapping[str, str] = {
  'TPU v4': 'v4',
  'TPU v5 lite': 'v5e',
  'TPU v5e': 'v5e',
  'TPU v5': 'v5p',
  'TPU v5p': 'v5p',
  'TPU v6 lite': 'v6e',
  'TPU v6e': 'v6e',
  'TPU7x': 'tpu7x',
  'NVIDIA H100 80GB HBM3': 'h100',
  'NVIDIA H200': 'h200',
}


def of_kind(device_kind: str) -> Chip | None:
  """Returns the chip that a `jax.Device` of this kind is; None if unknown."""
  name = _KINDS.get(device_kind)
  return None if name is None else CHIPS[name]
