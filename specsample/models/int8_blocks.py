"""Matrices as integers of 8 bits with a scale for each block of inputs.

This is Q8_0 of GGUF files, whose weights are kept as they are stored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specsample import types
from specsample.types import Array

# A CPU writes the float32 weights of a part, at most 8 MB, before it multiplies
# by them; they should stay in a cache.
_PART_ELEMENTS = 1 << 21


@types.pytree
class Int8Blocks:
  """A matrix [in, out], stored as [out, in] with scales along the inputs.

  Decoding takes about as long as with float32: on two cores of an AMD EPYC with
  AVX-512 the product into the vocabulary of SmolLM2 took 1.5 ms with one row
  and 2.3 with 5 at best, the float32 matrix 2.3 and 3.4 ms. With the processor
  shared, 5 rows took longer than in float32: 3.5 ms instead of 3.1.
  """

  values: Array  # [out, in] int8
  scale: Array  # [out, in / n] float16, of n successive inputs each

  @property
  def shape(self) -> tuple[int, int]:
    """The shape (in, out) of the matrix."""
    num_out, num_in = self.values.shape
    return num_in, num_out


def dense(x: Int8Blocks, dtype: Any) -> Array:
  """Returns the array [in, out] in the given dtype."""
  return _dequantised(x.values, x.scale).T.astype(dtype)


def lookup(table: Int8Blocks, ids: Array, dtype: Any) -> Array:
  """Looks up columns [..., D] of table [D, V].

  Raises:
    ValueError: there is a mesh.
  """
  refuse_mesh()
  take = lambda x: jnp.take(x, ids, axis=0)
  return _dequantised(take(table.values), take(table.scale)).astype(dtype)


def product(x: Array, kernel: Int8Blocks, dtype: Any) -> Array:
  """Multiplies rows x [R, D] by kernel [D, F]; see `matrices.product`.

  Raises:
    ValueError: there is a mesh.
  """
  refuse_mesh()
  y = jax.lax.platform_dependent(x, kernel, cpu=_by_parts, default=_whole)
  return y.astype(dtype)


def refuse_mesh() -> None:
  """Raises ValueError on a mesh, because `sharding` does not know this form."""
  if not jax.sharding.get_abstract_mesh().empty:
    raise ValueError(
      "weights is 'q8_0', which is not supported on a mesh: load the model "
      "with weights='int8' or None"
    )


def _dequantised(values, scale):
  """Returns vectors [..., D] in float32, given their scales [..., D / n]."""
  blocks = values.reshape(*scale.shape, -1).astype(jnp.float32)
  return (blocks * scale[..., None].astype(jnp.float32)).reshape(values.shape)


def _whole(x, kernel):
  return jnp.einsum(
    *('rd,df->rf', x, dense(kernel, x.dtype)),
    preferred_element_type=jnp.float32,
  )


def _by_parts(x, kernel):
  num_in, num_out = kernel.shape
  # At least two parts: XLA unrolls a loop of one, and then the weights of all
  # layers are in memory at once (with all matrices of SmolLM2 in this form that
  # is 425 MB, and a pass takes 8 times as long).
  size = min(-(-num_out // 2), max(1, _PART_ELEMENTS // num_in))

  def write(i, y):
    # The last part reaches back, so that all parts have the same size.
    start = jnp.minimum(i * size, num_out - size)
    part = lambda whole: jax.lax.dynamic_slice_in_dim(whole, start, size)
    values = _dequantised(part(kernel.values), part(kernel.scale))
    of_part = jnp.einsum(
      *('rd,fd->rf', x, values.astype(x.dtype)),
      preferred_element_type=jnp.float32,
    )
    return jax.lax.dynamic_update_slice_in_dim(y, of_part, start, axis=1)

  y = jnp.zeros((len(x), num_out), jnp.float32)
  return jax.lax.fori_loop(0, -(-num_out // size), write, y)
