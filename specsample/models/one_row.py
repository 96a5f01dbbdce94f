"""Products of one row with a matrix [in, out] on a CPU with AVX-512.

XLA's CPU backend does not read a matrix as fast as the memory allows if it
meets a single row. As one product for each core, over a part of the inner
dimension, it nearly does: on two cores of an AMD EPYC the products of
SmolLM2-135M took 10.2 and 12.3 ms this way, in two runs, 13.5 and 13.3 ms in
one piece, and 11.7 and 12.4 ms with the matrices transposed. Four and eight
parts were slower than two.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specsample.models import processor
from specsample.types import Array

# Smaller matrices stay in a cache of the processor.
_LEAST_ELEMENTS = 1 << 16
_MOST_PARTS = 8


def num_parts(kernel: Array) -> int:
  """Returns into how many parts `product` divides a matrix [in, out]."""
  is_here = (
    jax.default_backend() == 'cpu' and jax.sharding.get_abstract_mesh().empty
  )
  is_large = kernel.size >= _LEAST_ELEMENTS and kernel.dtype == jnp.float32
  if not (is_here and is_large and processor.has_avx512()):
    return 1
  parts = min(processor.num_cores(), _MOST_PARTS)
  return parts if kernel.shape[0] % parts == 0 else 1


def product(x: Array, kernel: Array, parts: int, dtype: Any) -> Array:
  """Multiplies one row x [1, D] by kernel [D, F], whose D has equal parts."""
  size = kernel.shape[0] // parts
  of_parts = jnp.einsum(
    'pd,pdf->pf',
    x.reshape(parts, size),
    kernel.reshape(parts, size, kernel.shape[1]),
    preferred_element_type=dtype,
  )
  return jnp.sum(of_parts, axis=0, keepdims=True)
