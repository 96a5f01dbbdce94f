"""Int8 arrays with scales, for weights and for the entries of KV caches.

Decoding is bound by the bytes that a step reads. Only stored values are
rounded; products use the dtype of the computation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.models import packed
from specsample.models import tensors
from specsample.types import Array, Params

# With at most this many queries, XLA's CPU backend is faster with the keys on
# the left of the product: it packs the right side first, and the keys are large
# (measured with 64 rows and 256 keys: 3 queries take 56 ms per pass instead of
# 117; the gain is 10% with 15 queries, and 192 are a quarter slower).
_FEW_QUERIES = 32
_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@types.pytree
class Int8:
  """An array stored as integers times one scale per vector."""

  values: Array  # [...] int8
  scale: Array  # float32, like `values` but of size 1 along the vectors

  shape = property(lambda self: self.values.shape)


def quantise(x: Array, axis: int = -1) -> Int8:
  """Rounds each vector of x to integers from -127 to 127 times a scale.

  No value is off by more than half a scale, which is the vector's largest
  absolute value / 254.

  Args:
    x: an array of a floating dtype.
    axis: the axis along which the vectors lie.
  """
  wide = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / 127
  values = jnp.round(wide / jnp.where(scale, scale, 1))
  return Int8(values=values.astype(jnp.int8), scale=scale)


def dense(x: Array | Int8, dtype: Any) -> Array:
  """Returns the array in the given dtype."""
  whole = x.values * x.scale if isinstance(x, Int8) else x
  return whole.astype(dtype)


def dtype_of(params: Params) -> Any:
  """Returns the dtype of the parameters that are not stored as int8."""
  is_matrix = lambda x: isinstance(x, Int8 | packed.Packed)
  leaves = jax.tree.leaves(params, is_leaf=is_matrix)
  return next(leaf.dtype for leaf in leaves if not isinstance(leaf, Int8))


def product(x: Array, kernel: Int8, axes: Any, dtype: Any) -> Array:
  """Multiplies rows x [R, D] by kernel [D, F] with a scale [1, F].

  The product is computed in the dtype of x. `axes` are the `sharding.Axes` of
  the result, and `dtype` is its dtype.
  """

  def whole(x, values):
    return sharding.einsum(
      'rd,df->rf',
      x,
      values.astype(x.dtype),
      axes=axes,
      preferred_element_type=jnp.float32,
    )

  size = _block_size(kernel.values)
  if size == len(kernel.values):
    y = whole(x, kernel.values)
  else:
    by_blocks = functools.partial(_by_blocks, size=size)
    y = jax.lax.platform_dependent(
      x, kernel.values, cpu=by_blocks, default=whole
    )
  return (y * kernel.scale).astype(dtype)


# A CPU writes the converted integers of a block, which should stay in a cache.
_BLOCK_ELEMENTS = 1 << 22


def _block_size(values):
  """Returns the most rows of a block whose number divides those of values."""
  num_in, num_out = values.shape
  if not jax.sharding.get_abstract_mesh().empty:
    return num_in
  most = max(1, _BLOCK_ELEMENTS // num_out)
  return max(n for n in range(1, min(most, num_in) + 1) if num_in % n == 0)


def _by_blocks(x, values, size):
  blocks = values.reshape(-1, size, values.shape[1])
  parts = jnp.swapaxes(x.reshape(len(x), -1, size), 0, 1)

  def add(total, block):
    part, values = block
    return total + _einsum('rd,df->rf', part, values.astype(x.dtype)), None

  start = jnp.zeros((len(x), values.shape[1]), jnp.float32)
  return jax.lax.scan(add, start, (parts, blocks))[0]


def stored_as(x: Array, entries: Array | Int8) -> Array | Int8:
  """Returns x [..., D] in the form in which the cache stores entries."""
  return quantise(x) if isinstance(entries, Int8) else x


def scores(query: Array, keys: Array | Int8) -> Array:
  """Returns query [B, H, Q, D] times keys [B, H, S, D], as [B, H, Q, S]."""
  if isinstance(keys, Int8):
    of_values = scores(query, keys.values.astype(query.dtype))
    return of_values * jnp.swapaxes(keys.scale, -1, -2)
  if query.shape[2] > _FEW_QUERIES:
    return _queries_first(query, keys)
  return jax.lax.platform_dependent(
    query, keys, cpu=_keys_first, default=_queries_first
  )


def _queries_first(query, keys):
  return _einsum('bkqh,bksh->bkqs', query, keys)


def _keys_first(query, keys):
  found = _einsum('bksh,bkqh->bksq', keys, query)
  # Without the barrier XLA swaps the two sides back.
  return jnp.swapaxes(jax.lax.optimization_barrier(found), -1, -2)


def mix(weights: Array, values: Array | Int8, dtype: Any) -> Array:
  """Returns the weighted sums [B, H, Q, D] of values [B, H, S, D].

  The weights are [B, H, Q, S]. Products use `dtype`; the result is float32.
  """
  if isinstance(values, Int8):
    weights = weights * jnp.swapaxes(values.scale, -1, -2)
    values = values.values
  return _einsum('bkqs,bksh->bkqh', weights.astype(dtype), values.astype(dtype))


def weight(name: str, leaf: Array, is_tied: bool) -> Array | Int8:
  """Quantises a parameter if it is a matrix of products, else returns it."""
  is_matrix = tensors.is_matrix(name, leaf, is_tied)
  return _quantise_weight(leaf) if is_matrix else leaf


# Each output of [..., in, out] has a scale of its own.
_IN = -2
_quantise_weight = jax.jit(functools.partial(quantise, axis=_IN))


def weights(params: Params) -> Params:
  """Returns the parameters of a model or drafter with int8 matrices.

  Each output has a scale of its own. The result can be used like `params`.
  """
  params = packed.plain(params)
  return _map(lambda leaf: quantise(leaf, axis=_IN), params, params)


def check(weights: str | None) -> None:
  """Raises ValueError unless `weights` is 'int8' or None."""
  if weights not in (None, 'int8'):
    raise ValueError(f"weights is {weights!r}: give 'int8', or None for dtype")


def names(params: Params) -> list[str]:
  """Returns the names, as by `tensors.key`, of the int8 parameters."""
  is_matrix = lambda x: isinstance(x, Int8 | packed.Packed)
  leaves = tensors.by_name(params, is_matrix)
  return [name for name, leaf in leaves.items() if isinstance(leaf, Int8)]


def refuse(params: Params) -> None:
  """Raises ValueError if any parameter to be saved is int8."""
  found = names(params)
  if found:
    raise ValueError(
      f'params has {tensors.listed(found)} in int8, which cannot be saved: '
      'give those of load(..., weights=None)'
    )


def axes(of_params: Params, params: Params) -> Params:
  """Returns the `sharding.Axes` of `weights(params)`, given those of params."""
  return _map(lambda leaf: of_kernel(*leaf), of_params, params)


def of_kernel(*axes: sharding.Axes) -> Int8:
  """Returns the `sharding.Axes` of an int8 matrix, given the matrix's axes."""
  scale = *axes[:_IN], None, axes[-1]
  return Int8(values=axes, scale=scale)  # type: ignore[arg-type]


def _map(function, tree, params):
  """Maps the leaves of tree whose parameters can be int8, keeps the others."""
  is_tied = 'unembedding' not in params

  def of_leaf(name, param, leaf):
    is_matrix = tensors.is_matrix(name, param, is_tied)
    return function(leaf) if is_matrix else leaf

  return tensors.map_named(of_leaf, params, tree)
