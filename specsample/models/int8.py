"""Arrays of 8-bit integers with scales: weights and the entries of caches.

Decoding is bound by the bytes that a step reads. Only what is stored is
rounded: products are of the dtype of the computation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.models import tensors
from specsample.models import transposed
from specsample.types import Array, Params

# Up to this many queries, XLA's CPU backend is faster with the keys as the left
# side of the product: it packs the right side first, and the keys are large
# (measured with 3 queries, 64 rows and 256 keys: 56 ms per pass in place of
# 117; with 15 queries 10% faster, with 192 a quarter slower).
_FEW_QUERIES = 32


@types.pytree
class Int8:
  """An array as integers times a scale for each of its vectors."""

  values: Array  # [...] int8
  scale: Array  # the same, of size 1 along the vectors, float32


def quantise(x: Array, axis: int = -1) -> Int8:
  """The nearest that -127 to 127 times a scale are to the vectors of x.

  No value is off by more than half a scale, the vector's largest / 254.

  Args:
    x: of a floating dtype.
    axis: that of the vectors.
  """
  wide = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / 127
  values = jnp.round(wide / jnp.where(scale, scale, 1))
  return Int8(values=values.astype(jnp.int8), scale=scale)


def dtype_of(params: Params) -> Any:
  """The dtype of parameters of which some may be of int8."""
  leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Int8))
  return next(leaf.dtype for leaf in leaves if not isinstance(leaf, Int8))


def stored_as(x: Array, entries: Array | Int8) -> Array | Int8:
  """x [..., D] as it will be found among entries of a cache."""
  return quantise(x) if isinstance(entries, Int8) else x


def scores(query: Array, keys: Array | Int8) -> Array:
  """Products [B, H, Q, S] of queries [B, H, Q, D] and keys [B, H, S, D]."""
  if isinstance(keys, Int8):
    of_values = scores(query, keys.values.astype(query.dtype))
    return of_values * jnp.swapaxes(keys.scale, -1, -2)
  if query.shape[2] > _FEW_QUERIES:
    return _queries_first(query, keys)
  return jax.lax.platform_dependent(
    query, keys, cpu=_keys_first, default=_queries_first
  )


def _queries_first(query, keys):
  return jnp.einsum(
    'bkqh,bksh->bkqs', query, keys, preferred_element_type=jnp.float32
  )


def _keys_first(query, keys):
  found = jnp.einsum(
    'bksh,bkqh->bksq', keys, query, preferred_element_type=jnp.float32
  )
  # Without the barrier XLA swaps the two sides back.
  return jnp.swapaxes(jax.lax.optimization_barrier(found), -1, -2)


def mix(weights: Array, values: Array | Int8, dtype: Any) -> Array:
  """Sums [B, H, Q, D] of values [B, H, S, D] by weights [B, H, Q, S], float32.

  The products are of `dtype`.
  """
  if isinstance(values, Int8):
    weights = weights * jnp.swapaxes(values.scale, -1, -2)
    values = values.values
  return jnp.einsum(
    'bkqs,bksh->bkqh',
    weights.astype(dtype),
    values.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def weight(name: str, leaf: Array, is_tied: bool) -> Array | Int8:
  """A parameter as of int8 if it can be, else as it is."""
  is_matrix = tensors.is_matrix(name, leaf, is_tied)
  return _quantise_weight(leaf) if is_matrix else leaf


# [..., in, out]: each output has a scale of its own.
_IN = -2
# In place of the array that is given, which is not needed any more.
_quantise_weight = jax.jit(functools.partial(quantise, axis=_IN))


def weights(params: Params) -> Params:
  """The parameters of a model or of a drafter, its matrices of int8.

  Each output has a scale of its own. What is made of them works as before.
  """
  params = transposed.plain(params)
  return _map(lambda leaf: quantise(leaf, axis=_IN), params, params)


def check(weights: str | None) -> None:
  """Raises ValueError unless it is what functions that load take."""
  if weights not in (None, 'int8'):
    raise ValueError(f"weights is {weights!r}: give 'int8', or None for dtype")


def names(params: Params) -> list[str]:
  """Which parameters are of int8, called as by `tensors.key`."""
  leaves = jax.tree_util.tree_leaves_with_path(
    params, is_leaf=lambda x: isinstance(x, Int8)
  )
  return [tensors.key(path) for path, leaf in leaves if isinstance(leaf, Int8)]


def refuse(params: Params) -> None:
  """Raises ValueError where parameters to be saved are of int8."""
  found = names(params)
  if found:
    raise ValueError(
      f'{tensors.listed(found)} of int8, which are not saved: give the exact '
      'parameters, those of load(..., weights=None)'
    )


def axes(of_params: Params, params: Params) -> Params:
  """The `sharding.Axes` of `weights(params)`, of those of params."""
  return _map(lambda leaf: of_kernel(*leaf), of_params, params)


def of_kernel(*axes: sharding.Axes) -> Int8:
  """The `sharding.Axes` of a matrix of int8, of those of the matrix."""
  scale = *axes[:_IN], None, axes[-1]
  return Int8(values=axes, scale=scale)  # type: ignore[arg-type]


def _map(function, tree, params):
  """A tree like params, those that can be of int8 mapped."""
  is_leaf = lambda x: isinstance(x, tuple)
  is_tied = 'unembedding' not in params
  paths, treedef = jax.tree_util.tree_flatten_with_path(params)
  leaves = jax.tree.leaves(tree, is_leaf=is_leaf)
  is_matrix = [
    tensors.is_matrix(tensors.key(path), leaf, is_tied) for path, leaf in paths
  ]
  mapped = [
    function(leaf) if chosen else leaf
    for leaf, chosen in zip(leaves, is_matrix, strict=True)
  ]
  return jax.tree_util.tree_unflatten(treedef, mapped)
