"""Key-value caches: one leaf a layer, a length a row.

Layers are separate leaves of a tuple because a loop carry of stacked layers is
copied whole at every step (measured: 50 times slower on a CPU).
"""

import jax
import jax.numpy as jnp

from specsample import types
from specsample.types import Array


@types.pytree
class KVCache:
  """Keys and values of the tokens so far; later entries are garbage."""

  keys: tuple[Array, ...]  # L of [B, S, H, head_dim], H key-value heads
  values: tuple[Array, ...]  # L of [B, S, H, head_dim]
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
  shape = (batch_size, max_length, num_heads, head_dim)
  empty = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
  return KVCache(
    keys=empty(),
    values=empty(),
    length=jnp.zeros(batch_size, jnp.int32),
  )


def write(buffer: Array, update: Array, start: Array) -> Array:
  """Writes update [B, T, ...] into buffer [B, S, ...] from row start [B] on.

  The caller leaves room for T entries: a start past S - T is moved back.
  """

  def write_row(buffer, update, start):
    origin = (start,) + (0,) * (buffer.ndim - 1)
    return jax.lax.dynamic_update_slice(buffer, update, origin)

  if buffer.shape[0] == 1:  # mapped, the update becomes a slower scatter
    return write_row(buffer[0], update[0], start[0])[None]
  return jax.vmap(write_row)(buffer, update, start)


def commit(cache: KVCache, length: Array) -> KVCache:
  """Keeps the first length [B] tokens of each row."""
  return KVCache(keys=cache.keys, values=cache.values, length=length)
