"""Weight matrices [in, out] in each form in which they are stored.

A matrix is an array, integers with a scale for each output, or an array packed
for a CPU.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import sharding
from specsample.models import int8
from specsample.models import packed
from specsample.types import Array

_Stored = int8.Int8 | packed.Packed
Matrix = Array | _Stored


def is_stored(leaf: Any) -> bool:
  """Returns whether a leaf is a matrix in another form than an array."""
  return isinstance(leaf, _Stored)


def dense(x: Matrix, dtype: Any) -> Array:
  """Returns the array [in, out] in the given dtype."""
  if isinstance(x, int8.Int8):
    return int8.dense(x, dtype)
  values = packed.dense(x) if isinstance(x, packed.Packed) else x
  return values.astype(dtype)


def products(
  x: Array, kernels: Sequence[Matrix], axes: Sequence[Any], dtype: Any
) -> list[Array]:
  """Does the same as `product` for several kernels, in one call if packed."""
  if all(isinstance(kernel, packed.Packed) for kernel in kernels):
    return [y.astype(dtype) for y in packed.products(x, list(kernels))]
  return [
    product(x, kernel, of_result, dtype)
    for kernel, of_result in zip(kernels, axes, strict=True)
  ]


def product(x: Array, kernel: Matrix, axes: Any, dtype: Any) -> Array:
  """Multiplies rows x [R, D] by kernel [D, F].

  Args:
    x: the rows; the product is computed in their dtype.
    kernel: an array, int8 with a scale [1, F], or packed.
    axes: the `sharding.Axes` of the result.
    dtype: the dtype of the result.
  """
  if isinstance(kernel, int8.Int8):
    return int8.product(x, kernel, axes, dtype)
  if isinstance(kernel, packed.Packed):
    return packed.products(x, [kernel])[0].astype(dtype)
  return sharding.einsum(
    'rd,df->rf', x, kernel, axes=axes, preferred_element_type=dtype
  )


def product_by_group(
  x: Array, kernels: Array | int8.Int8, group: Array
) -> Array:
  """Multiplies rows x [R, D] by kernels[group], one kernel per row.

  Args:
    x: the rows; the product is computed in their dtype.
    kernels: [E, D, F]; int8 kernels have scales [E, 1, F].
    group: [R], the index of each row's kernel, in ascending order.
  """
  if isinstance(kernels, int8.Int8):
    y = product_by_group(x, kernels.values.astype(x.dtype), group)
    return (y * kernels.scale[group, 0]).astype(x.dtype)
  # A TPU's compiler refuses a higher precision than that of bfloat16 factors,
  # which `jax.default_matmul_precision` would ask for.
  precision = None if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  sizes = jnp.bincount(group, length=kernels.shape[0])
  return jax.lax.ragged_dot(x, kernels, sizes, precision=precision)


def lookup(
  table: Matrix, ids: Array, vocab: sharding.Axis, dtype: Any
) -> Array:
  """Looks up columns [..., D] of table [D, V]; `Int8` has a scale [1, V]."""
  if isinstance(table, packed.Packed):
    return packed.lookup(table, ids).astype(dtype)
  if not isinstance(table, int8.Int8):
    return indexing.lookup(table, ids, vocab)
  found = indexing.lookup(table.values, ids, vocab).astype(jnp.float32)
  return (found * indexing.lookup(table.scale, ids, vocab)).astype(dtype)
