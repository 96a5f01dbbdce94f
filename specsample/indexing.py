"""Indexing along axes that a mesh may divide, above all the vocabulary.

Each entry is looked up on the device that holds it: no array of vocabulary size
is ever gathered.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.types import Array


def vocab_ids(vocab_size: int) -> Array:
  """Returns all token ids [V] int32, divided like logits."""
  vocab = sharding.Axis('vocab', vocab_size)
  return sharding.constrain(jnp.arange(vocab_size), vocab)


def lookup(table: Array, ids: Array, vocab: sharding.Axis) -> Array:
  """Returns columns of table [D, V] as [..., D], read where they live.

  Args:
    table: divided along `vocab`, its second axis, and nothing else.
    ids: [B, ...] int32, within the vocabulary.
    vocab: the axis.
  """
  of_ids = ('batch', *[None] * (ids.ndim - 1))
  if not sharding.is_divided(vocab):
    return sharding.map_parts(
      _columns,
      (table, ids),
      ((None, None), of_ids),
      result=(*of_ids, None),
    )

  def own_columns(table, own_ids, ids):
    index = ids - own_ids[0]
    is_here = (index >= 0) & (index < own_ids.size)
    found = _columns(table, jnp.clip(index, 0, own_ids.size - 1))
    return jnp.where(is_here[..., None], found, 0)

  return sharding.map_parts(
    own_columns,
    (table, vocab_ids(table.shape[1]), ids),
    ((None, vocab), (vocab,), of_ids),
    result=(*of_ids, None),
    sum_over=vocab,
  )


def pick(x: Array, index: Array) -> Array:
  """Returns x[index] along the last axis of x [..., V], for an index [...].

  An index [] is used for all rows. If the vocabulary is divided, only a scalar
  per row is gathered.
  """
  if not sharding.is_divided(sharding.Axis('vocab', x.shape[-1])):
    index = jnp.broadcast_to(index, x.shape[:-1])
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
  here = jnp.arange(x.shape[-1]) == index[..., None]
  return jnp.sum(jnp.where(here, x, 0), axis=-1)


def take(x: Array, ids: Array) -> Array:
  """Returns the entries [..., m] of x [..., V] at ids [..., m]."""
  if not sharding.is_divided(sharding.Axis('vocab', x.shape[-1])):
    return jnp.take_along_axis(x, ids, axis=-1)
  return pick(x[..., None, :], ids)


def at(x: Array, index: Array) -> Array:
  """Returns the entries [B, n, ...] of x [B, T, ...] at index [B, n]."""
  index = jnp.expand_dims(index, tuple(range(2, x.ndim)))
  return jnp.take_along_axis(x, index, axis=1)


def where(rows: Array, x: Any, y: Any) -> Any:
  """Returns x in rows [B] that are set, else y: trees of arrays [B, ...]."""

  def choose(x, y):
    return jnp.where(jnp.expand_dims(rows, tuple(range(1, x.ndim))), x, y)

  return jax.tree.map(choose, x, y)


def put(values: Array, ids: Array, size: int) -> Array:
  """Returns [B, ..., V] with values [B, ..., m] at ids, and -inf elsewhere.

  Args:
    values: floats.
    ids: [B, ..., m] int32, distinct within a row.
    size: V.
  """
  of_rows = ('batch', *[None] * (ids.ndim - 2))
  vocab = sharding.Axis('vocab', size)

  def own_values(values, ids, own_ids):
    flat = ids.reshape(-1, ids.shape[-1]) - own_ids[0]
    # Negative indices would count from the end.
    flat = jnp.where(flat < 0, own_ids.size, flat)
    empty = jnp.full((len(flat), own_ids.size), -jnp.inf, values.dtype)
    write = lambda row, place, new: row.at[place].set(new, mode='drop')
    found = jax.vmap(write)(empty, flat, values.reshape(flat.shape))
    return found.reshape(*ids.shape[:-1], -1)

  return sharding.map_parts(
    own_values,
    (values, ids, vocab_ids(size)),
    ((*of_rows, None), (*of_rows, None), (vocab,)),
    result=(*of_rows, vocab),
  )


def top_k(x: Array, k: int) -> tuple[Array, Array]:
  """Returns the k largest entries of x [B, ..., V] and their indices.

  Both are [B, ..., k], in decreasing order; of equal entries the first comes
  first. If the vocabulary is divided, k entries of each part are gathered.
  """
  vocab = sharding.Axis('vocab', x.shape[-1])
  if not sharding.is_divided(vocab):
    return _largest(x, k)

  def own_largest(x, own_ids):
    values, index = _largest(x, min(k, own_ids.size))
    return [values, index + own_ids[0]]

  of_rows = ('batch', *[None] * (x.ndim - 2))
  divided = (*of_rows, vocab)
  values, ids = sharding.map_parts(
    own_largest,
    (x, vocab_ids(x.shape[-1])),
    (divided, (vocab,)),
    result=[divided, divided],
  )
  gather = lambda y: sharding.constrain(y, *of_rows, None)
  values, best = jax.lax.top_k(gather(values), k)
  return values, jnp.take_along_axis(gather(ids), best, axis=-1)


# A TPU's top-k takes the time and memory of 128 rows for one, so it only gets
# parts of long rows. CPUs gain too: five rows of 262,144 take 0.2 ms, not 1.3.
_NUM_BLOCKS = 256
_LONG = 1 << 14


def _largest(x, k):
  """Returns `jax.lax.top_k` of x [..., V]."""
  # As rows [n, V]: the CPU compiler sorts arrays of other shapes in full.
  rows = x.reshape(-1, x.shape[-1])
  is_long = rows.shape[1] >= _LONG and 4 * k <= _NUM_BLOCKS
  find = _largest_by_blocks if is_long else jax.lax.top_k
  # Otherwise a caller that reads only some of them, such as the first, would
  # make the CPU compiler sort whole rows. With one barrier for both, XLA cannot
  # divide the top-k over a mesh.
  values, ids = map(jax.lax.optimization_barrier, find(rows, k))
  shape = (*x.shape[:-1], k)
  return values.reshape(shape), ids.reshape(shape)


def _largest_by_blocks(rows, k):
  size = -(-rows.shape[1] // _NUM_BLOCKS)
  padding = _NUM_BLOCKS * size - rows.shape[1]
  blocks = jnp.pad(rows, ((0, 0), (0, padding)), constant_values=-jnp.inf)
  blocks = blocks.reshape(len(rows), _NUM_BLOCKS, size)
  # The k largest are in the k blocks with the largest maxima, which are sorted
  # so that of equal entries the first still comes first.
  which = jax.lax.top_k(jnp.max(blocks, axis=2), k)[1]
  which = jnp.sort(which, axis=1)
  candidates = jnp.take_along_axis(blocks, which[:, :, None], axis=1)
  values, place = jax.lax.top_k(candidates.reshape(len(rows), -1), k)
  block = jnp.take_along_axis(which, place // size, axis=1)
  return values, block * size + place % size


def row(x: Array, index: Array, axis: sharding.Axes) -> Array:
  """Returns x[index] along the first axis of x [N, ...], for an index []."""
  if not sharding.is_divided(axis):
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
  here = jnp.arange(x.shape[0]) == index
  return jnp.sum(jnp.where(here[:, None], x, 0), axis=0)


# The number of int8 columns that TPUs store together.
_TILE = 32


def _columns(table, ids):
  flat = ids.reshape(-1)
  size = table.shape[1]
  is_tiled = table.dtype == jnp.int8 and size % _TILE == 0
  if is_tiled and flat.size * _TILE <= size:
    # Read whole tiles, because TPUs copy the whole table to reach into one. For
    # many columns that copy is the cheaper way.
    tiles = table.reshape(len(table), -1, _TILE)
    read = jax.lax.optimization_barrier(jnp.take(tiles, flat // _TILE, axis=1))
    within = (flat % _TILE)[:, None]
    found = jnp.take_along_axis(read, within[None], axis=2)[..., 0]
  else:
    found = jnp.take(table, flat, axis=1)
  return found.T.reshape(*ids.shape, -1)
