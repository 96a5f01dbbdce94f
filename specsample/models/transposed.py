"""Matrices stored transposed, for products with few rows on a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample import types
from specsample.models import processor
from specsample.models import tensors
from specsample.types import Array, ArrayLike, Params

# XLA's CPU backend is efficient with up to 4 rows, with 8 and with 16: on two
# cores of an AMD EPYC the product into the vocabulary of SmolLM2 takes 8.3 ms
# with 4 rows, 13.3 with 5, 10.3 with 8, 15.4 with 9, 12.1 with 16.
_ANY_NUMBER = 4
_WHOLE_TILES = (8, 16)
# With more rows than this, packing is a small part of the work, and the weights
# are better on the right (512 rows: 273 ms, and 366 with them on the left).
_MANY_ROWS = 128


@types.pytree
class Transposed:
  """A matrix [in, out] stored as [out, in], to be read by few rows on a CPU.

  XLA's CPU backend packs the right side of a product before it computes, which
  reads all weights a second time and writes them. With the weights on the left
  it packs the few rows instead; the weights then have to be [out, in]. On two
  cores of an AMD EPYC a pass of SmolLM2-135M over 1, 2, 3, 4, 5 and 8 tokens
  takes 38, 45, 51, 49, 59 and 66 ms this way, and 40, 55, 83, 83, 92 and 117 ms
  with weights stored as [in, out]. With AVX-512 packing is cheap, so matrices
  stay [in, out] there: a round of MTP with 2 drafts takes 20.6 ms, 22.2 ms with
  matrices stored transposed; with 4 drafts 25.5 and 28.5 ms.

  NumPy sees it as the array [in, out].
  """

  values: Array  # [out, in]

  @property
  def shape(self) -> tuple[int, int]:
    """The shape (in, out) of the matrix."""
    num_out, num_in = self.values.shape
    return num_in, num_out

  @property
  def dtype(self) -> Any:
    """The dtype of the values."""
    return self.values.dtype

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    """Returns the array [in, out]."""
    return np.array(self.values, dtype, copy=copy).T


def is_transposed(leaf: Any) -> bool:
  """Returns whether a leaf is a `Transposed`, for `jax.tree.map`."""
  return isinstance(leaf, Transposed)


def product(x: Array, kernel: Transposed, axes: Any, dtype: Any) -> Array:
  """Multiplies rows x [R, D] by kernel [D, F]; see `matrices.product`."""
  num_rows = len(x)
  # A product with a vector packs nothing.
  if num_rows == 1 or num_rows > _MANY_ROWS:
    return sharding.einsum(
      'rd,fd->rf', x, kernel.values, axes=axes, preferred_element_type=dtype
    )
  if num_rows > _ANY_NUMBER:
    whole = next((n for n in _WHOLE_TILES if num_rows <= n), num_rows)
    x = jnp.pad(x, ((0, whole - num_rows), (0, 0)))
  y = sharding.einsum(
    'fd,rd->fr', kernel.values, x, axes=axes[::-1], preferred_element_type=dtype
  )
  # Without the barrier XLA swaps the two sides back.
  return jax.lax.optimization_barrier(y).T[:num_rows]


def as_is_fast_here(
  model: Any, path: tuple[Any, ...], leaf: ArrayLike
) -> Array | Transposed:
  """Transposes float32 matrices on a CPU; this is a `tensors.Convert`.

  On a mesh they stay as they are, because `sharding` does not know this form.
  With AVX-512 they do too (`one_row`).
  """
  is_here = jax.default_backend() == 'cpu' and jax.sharding.get_mesh().empty
  is_here &= not processor.has_avx512()
  is_matrix = leaf.ndim == 2 and tensors.is_matrix(
    tensors.key(path), leaf, model.tie_embeddings
  )
  if is_here and is_matrix and leaf.dtype == jnp.float32:
    return Transposed(values=jax.device_put(leaf.T))
  return tensors.as_read(model, path, leaf)


def plain(params: Params) -> Params:
  """Returns the parameters with transposed matrices as arrays [in, out]."""
  whole = lambda x: x.values.T if is_transposed(x) else x
  return jax.tree.map(whole, params, is_leaf=is_transposed)


def like(params: Params, others: Params) -> Params:
  """Returns the parameters with matrices stored as those of `others` are.

  It stores the [in, out] matrices of a training step for decoding again.
  """
  stored = lambda x, other: (
    Transposed(values=jnp.transpose(x))
    if is_transposed(other) and not is_transposed(x)
    else x
  )
  return jax.tree.map(stored, params, others, is_leaf=is_transposed)
