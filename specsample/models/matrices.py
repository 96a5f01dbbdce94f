"""Matrices [in, out] of products, in each form that they are stored in.

An array, integers with scales, or the array transposed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import sharding
from specsample.models import int8
from specsample.models import transposed
from specsample.types import Array

Matrix = Array | int8.Int8 | transposed.Transposed


def dense(x: Matrix, dtype: Any) -> Array:
  """The array [in, out], of a dtype."""
  if isinstance(x, int8.Int8):
    return (x.values * x.scale).astype(dtype)
  values = x.values.T if isinstance(x, transposed.Transposed) else x
  return values.astype(dtype)


def product(x: Array, kernel: Matrix, axes: Any, dtype: Any) -> Array:
  """Rows x [R, D] @ kernel [D, F].

  Args:
    x: what the product is made in the dtype of.
    kernel: an array, of int8 with a scale [1, F], or transposed.
    axes: the `sharding.Axes` of the result.
    dtype: of the result.
  """
  if isinstance(kernel, int8.Int8):
    y = product(x, kernel.values.astype(x.dtype), axes, dtype)
    return (y * kernel.scale).astype(dtype)
  if isinstance(kernel, transposed.Transposed):
    return transposed.product(x, kernel, axes, dtype)
  return sharding.einsum(
    'rd,df->rf', x, kernel, axes=axes, preferred_element_type=dtype
  )


def product_by_group(
  x: Array, kernels: Array | int8.Int8, group: Array
) -> Array:
  """Rows x [R, D] @ kernels[group] [R, D, F], of int8 with scales [E, 1, F].

  Args:
    x: the rows; the product is of their dtype.
    kernels: [E, D, F].
    group: [R], which is the kernel of each row; it does not fall.
  """
  if isinstance(kernels, int8.Int8):
    y = product_by_group(x, kernels.values.astype(x.dtype), group)
    return (y * kernels.scale[group, 0]).astype(x.dtype)
  return jax.lax.ragged_dot(
    x, kernels, jnp.bincount(group, length=kernels.shape[0])
  )


def lookup(
  table: Matrix, ids: Array, vocab: sharding.Axis, dtype: Any
) -> Array:
  """Columns of table [D, V], of int8 with a scale [1, V]: [..., D]."""
  if isinstance(table, transposed.Transposed):
    return jnp.take(table.values, ids, axis=0)
  if not isinstance(table, int8.Int8):
    return indexing.lookup(table, ids, vocab)
  found = indexing.lookup(table.values, ids, vocab).astype(jnp.float32)
  return (found * indexing.lookup(table.scale, ids, vocab)).astype(dtype)
