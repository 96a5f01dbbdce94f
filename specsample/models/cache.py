"""Key-value caches: one leaf a layer, a length a row.

Layers are separate leaves of a tuple because a loop carry of stacked layers is
copied whole at every step (measured: 50 times slower on a CPU).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.types import Array


@types.pytree
class KVCache:
  """Keys and values of the tokens so far; later entries are garbage."""

  keys: tuple[Array, ...]  # L of [B, H, S, head_dim], H key-value heads
  values: tuple[Array, ...]  # L of [B, H, S, head_dim]
  length: Array  # [B] int32, tokens kept


def init(
  batch_size: int,
  max_length: int,
  num_layers: int,
  num_heads: int,
  head_dim: int,
  dtype: jnp.dtype,
) -> KVCache:
  """An empty cache."""
  shape = (batch_size, num_heads, max_length, head_dim)
  axes = ('batch', sharding.Axis('kv_heads', num_heads), None, None)
  empty = lambda: tuple(
    sharding.zeros(shape, dtype, *axes) for _ in range(num_layers)
  )
  return KVCache(
    keys=empty(),
    values=empty(),
    length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
  )


def append(
  cache: KVCache, keys: Sequence[Array], values: Sequence[Array], after: Array
) -> KVCache:
  """Writes L of [B, H, T, head_dim] behind each row's kept tokens.

  `after` [B, D] is a result of the layers that read the cache. Adding 0 times
  it makes the writes wait for those reads; without an order between the two,
  the CPU backend copies every leaf at every step (measured: 2.5 of 20 ms).

  A cache with room for no token stays as it is: whole sequences pass by it.
  """
  if not cache.keys[0].shape[2]:
    return cache
  wait = (0 * after[:, :1, None, None]).astype(keys[0].dtype)

  def write_all(buffers, updates):
    return tuple(
      write(buffer, update + wait, cache.length, axis=1)
      for buffer, update in zip(buffers, updates, strict=True)
    )

  return KVCache(
    keys=write_all(cache.keys, keys),
    values=write_all(cache.values, values),
    length=cache.length + keys[0].shape[2],
  )


def write(buffer: Array, update: Array, start: Array, axis: int = 0) -> Array:
  """Writes updates of T entries into buffer rows [B, ...] from start [B] on.

  `axis` is that of the entries in a row. The caller leaves room for T of them:
  a start too far behind is moved back.
  """
  write_row = lambda buffer, update, start: jax.lax.dynamic_update_slice_in_dim(
    buffer, update, start, axis
  )
  if buffer.shape[0] == 1:  # mapped, the update becomes a slower scatter
    return write_row(buffer[0], update[0], start[0])[None]
  return jax.vmap(write_row)(buffer, update, start)


def commit(cache: KVCache, length: Array, path: Array | None = None) -> KVCache:
  """Keeps the first length [B] tokens of each row.

  With path [B, P] the entries there are first moved, one behind another, to
  where the first of them is.
  """
  if path is None:
    return KVCache(keys=cache.keys, values=cache.values, length=length)
  start = path[:, 0] + 1

  def move(buffer):
    take = jax.vmap(lambda row, index: jnp.take(row, index, axis=1))
    return write(buffer, take(buffer, path[:, 1:]), start, axis=1)

  return KVCache(
    keys=tuple(map(move, cache.keys)),
    values=tuple(map(move, cache.values)),
    length=length,
  )
