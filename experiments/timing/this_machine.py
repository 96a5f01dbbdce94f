"""The CPU that this process runs on, measured and described as a chip."""

import math
import os

import jax
import jax.numpy as jnp

from experiments.command import clock
from experiments.timing import hardware
from specsample.cost import chips

# Large enough for full speed; a product takes half a second or less.
_SIDE = 2048
_REPEATS = 5


def chip() -> chips.Chip:
  """Measures memory size, memory bandwidth and products of float32 matrices."""
  return chips.Chip(
    hbm_bytes=os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
    hbm_bandwidth=hardware.memory_bandwidth(),
    flops=_product_flops(),
    link_bandwidth=math.inf,  # one device sends nothing
  )


def _product_flops():
  matrix = jnp.ones((_SIDE, _SIDE), jnp.float32)
  product = jax.jit(jnp.matmul)
  times = [
    clock.seconds(product, matrix, matrix)[1] for _ in range(_REPEATS + 1)
  ]
  return 2 * _SIDE**3 / min(times[1:])  # the first one compiles
