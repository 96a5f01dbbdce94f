"""Matrices packed for products of few rows on a CPU.

XLA packs the right side of every product of two rows or more, which reads all
weights a second time and writes them. Packed once, when they are loaded, they
are read at the speed of the memory, so that a pass over several tokens costs
about as much as a pass over one (`cpu/rows.cc`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.cpu import native
from specsample.models import tensors
from specsample.types import Array, ArrayLike, Params


@types.pytree
class Packed:
  """A float32 matrix [in, out] stored in panels of its outputs.

  Values that bfloat16 holds exactly are stored in it: half the bytes are read,
  and products are still computed in float32. NumPy sees the array [in, out].
  """

  # [P, in, W] float32 or bfloat16; W is `native.panel`'s. The columns of a
  # bfloat16 panel take turns between two vector registers.
  values: Array
  num_out: int = types.static()  # P * W less the zeros that fill the last panel

  # Tokens of a prompt that are read at once (`loop.request`): more cost more in
  # proportion, so a short last chunk wastes least.
  prefill_chunk = 64

  # Those of the matrix.
  ndim = 2
  dtype = np.dtype('float32')
  shape = property(lambda self: (self.values.shape[1], self.num_out))
  T = property(lambda self: dense(self).T)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    return np.array(dense(self), dtype, copy=copy)


def is_packed(leaf: Any) -> bool:
  """Returns whether a leaf is a `Packed`, for `jax.tree.map`."""
  return isinstance(leaf, Packed)


def pack(matrix: ArrayLike, is_rounded: bool | None = None) -> Packed:
  """Packs a float32 matrix [in, out].

  Args:
    matrix: the matrix.
    is_rounded: whether its values are rounded to bfloat16; by default they are
      if that changes none.
  """
  if is_rounded is None:
    is_rounded = _is_bfloat16(matrix)
  return Packed(values=_panels(matrix, is_rounded), num_out=matrix.shape[1])


@functools.partial(jax.jit, static_argnames='is_narrow')
def _panels(matrix, is_narrow):
  width, lanes = native.panel()
  num_in, num_out = matrix.shape
  matrix = jnp.pad(matrix, ((0, 0), (0, -num_out % width)))
  if is_narrow:
    matrix = matrix.astype(jnp.bfloat16).reshape(num_in, -1, 2, lanes)
    matrix = jnp.swapaxes(matrix, 2, 3)
  return jnp.swapaxes(matrix.reshape(num_in, -1, width), 0, 1)


def dense(packed: Packed) -> Array:
  """Returns the array [in, out] in float32."""
  values = jnp.swapaxes(packed.values, 0, 1)
  num_in = values.shape[0]
  if values.dtype == jnp.bfloat16:
    _, lanes = native.panel()
    values = jnp.swapaxes(values.reshape(num_in, -1, lanes, 2), 2, 3)
  values = values.reshape(num_in, -1)[:, : packed.num_out]
  return values.astype(jnp.float32)


def lookup(table: Packed, ids: Array) -> Array:
  """Returns columns [..., D] of table [D, V]; ids from 0 to V - 1."""
  width, lanes = native.panel()
  column = ids % width
  if table.values.dtype == jnp.bfloat16:
    block, of_block = column // (2 * lanes), column % (2 * lanes)
    column = 2 * (block * lanes + of_block % lanes) + of_block // lanes
  return table.values[ids // width, :, column].astype(jnp.float32)


@jax.custom_vjp
def products(x: Array, kernels: list[Packed]) -> list[Array]:
  """Multiplies rows x [R, D] by each matrix [D, F], in one call.

  A row's result has the same bits whatever other rows there are.
  """
  values = [kernel.values for kernel in kernels]
  found = native.products(x.astype(jnp.float32), values)
  return [
    y[:, : kernel.num_out] for y, kernel in zip(found, kernels, strict=True)
  ]


def _forward(x, kernels):
  return products(x, kernels), (x, kernels)


def _backward(saved, gradients):
  plain = lambda x, kernels: [x @ dense(kernel) for kernel in kernels]
  return jax.vjp(plain, *saved)[1](gradients)


products.defvjp(_forward, _backward)


def as_is_fast_here(model: Any, name: str, leaf: ArrayLike) -> Array | Packed:
  """Packs float32 matrices on a CPU; this is a `tensors.Convert`."""
  if _can_pack(name, leaf, model.tie_embeddings) and native.is_used():
    return pack(leaf)
  return tensors.as_read(model, name, leaf)


def _can_pack(name, leaf, is_tied):
  is_matrix = leaf.ndim == 2 and tensors.is_matrix(name, leaf, is_tied)
  # Latent attention multiplies parts of this matrix, head by head.
  is_in_parts = name.endswith('attention.key_value.kernel')
  return is_matrix and not is_in_parts and leaf.dtype == jnp.float32


def of_drafter(params: Params) -> Params:
  """Packs the matrices of a drafter's parameters, if they are packed here.

  The columns of the target's unembedding are rounded to bfloat16, which halves
  what a draft reads. Drafts are drawn from the distribution of these weights,
  so the output stays exact.
  """
  if not native.is_used():
    return params

  def convert(name, leaf):
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    if not is_array or not _can_pack(name, leaf, is_tied=False):
      return leaf
    is_of_target = name == 'vocabulary.unembedding'
    return pack(leaf, is_rounded=is_of_target or None)

  is_leaf = lambda x: not isinstance(x, dict)
  return tensors.map_named(convert, params, is_leaf=is_leaf)


def plain(params: Params) -> Params:
  """Returns the parameters with packed matrices as arrays [in, out]."""
  return jax.tree.map(
    lambda x: dense(x) if is_packed(x) else x, params, is_leaf=is_packed
  )


def like(params: Params, others: Params) -> Params:
  """Returns the parameters with the matrices packed that `others` has packed.

  It packs the [in, out] matrices of a training step for decoding again.
  """
  again = lambda x, other: (
    pack(x, False) if is_packed(other) and not is_packed(x) else x
  )
  return jax.tree.map(again, params, others, is_leaf=is_packed)


def _is_bfloat16(matrix):
  """Returns whether bfloat16 holds each value of a float32 matrix exactly."""
  # Most matrices that are not bfloat16 show it in their first rows.
  for rows in (matrix[:8], matrix):
    low = np.asarray(rows).view(np.uint32) & 0xFFFF
    if low.any():
      return False
  return True
