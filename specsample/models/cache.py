"""KV caches: one leaf per layer, one length per row.

Layers are separate leaves of a tuple because a loop carry of stacked layers is
copied whole at every step (measured: 50 times slower on a CPU).

A layer whose tokens see only a window keeps them in a ring: token i is in entry
i % S. Rejected tokens have then overwritten the tokens S positions before them,
so a ring has room for a window and for all tokens that are fed before a commit.

A recurrent layer (`gated_delta`) has a state instead, and no keys and values.
`append` leaves it alone and adds a log, which `commit` folds into it.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.models import gated_delta
from specsample.models import int8
from specsample.types import Array

# [B, H, S, D] of a layer, or a pytree of such arrays; None if there is none.
Entries = Any


@types.pytree
class KVCache:
  """Keys and values of the tokens so far; other entries are garbage."""

  keys: tuple[Entries, ...]  # L of [B, H, S, head_dim], H key-value heads
  values: tuple[Entries, ...]  # L of [B, H, S, head_dim]
  length: Array  # [B] int32, tokens kept
  rings: tuple[int, ...] = types.static(default=())  # layers that are rings
  # Only a model with recurrent layers has these: L states, None for attention,
  # and after `append` L logs, which are for the state before the new tokens.
  states: tuple[gated_delta.State | None, ...] = ()
  logs: tuple[gated_delta.Log | None, ...] = ()


@types.pytree
class New:
  """Keys and values of tokens that are not in the cache yet."""

  keys: tuple[Entries, ...]  # L of [B, H, T, head_dim]
  values: tuple[Entries, ...]  # L of [B, H, T, head_dim]
  after: Array  # [B, D], a result of the layers that read the cache
  logs: tuple[gated_delta.Log | None, ...] = ()  # of a `KVCache`


def init(
  batch_size: int,
  max_length: int,
  num_layers: int,
  num_heads: int,
  head_dim: int,
  dtype: jnp.dtype,
) -> KVCache:
  """Returns an empty cache whose layers all have the same shape."""
  make = lambda: tuple(
    entries(batch_size, max_length, num_heads, head_dim, dtype)
    for _ in range(num_layers)
  )
  return KVCache(keys=make(), values=make(), length=no_tokens(batch_size))


def entries(
  batch_size: int,
  max_length: int,
  num_heads: int,
  head_dim: int,
  dtype: jnp.dtype,
) -> Entries:
  """Returns room for a layer's keys or values; int8 includes the scales."""
  axes = ('batch', sharding.Axis('kv_heads', num_heads), None, None)
  shape = (batch_size, num_heads, max_length)
  zeros = lambda size, dtype: sharding.zeros((*shape, size), dtype, *axes)
  values = zeros(head_dim, dtype)
  if dtype != jnp.int8:
    return values
  return int8.Int8(values=values, scale=zeros(1, jnp.float32))


def no_tokens(batch_size: int) -> Array:
  """Returns the length of an empty cache."""
  return sharding.zeros((batch_size,), jnp.int32, 'batch')


def size(entries: Entries) -> int:
  """Returns S, the number of tokens that layers have room for.

  For several layers, it is that of the first one with entries.
  """
  return jax.tree.leaves(entries)[0].shape[2]


def append(
  cache: KVCache,
  keys: Sequence[Entries],
  values: Sequence[Entries],
  after: Array,
  count: Array | None = None,
  logs: tuple[gated_delta.Log | None, ...] = (),
) -> KVCache:
  """Writes L of [B, H, T, head_dim] after each row's kept tokens.

  If it is known that only the first count [B] of them stay, no others are
  written to rings, so that T may be larger than a ring.

  `after` [B, D] is a result of the layers that read the cache. Adding 0 * after
  makes the writes wait for those reads; without an order between the two, the
  CPU backend copies every leaf at every step (measured: 2.5 of 20 ms).

  A cache with no room is returned unchanged: the model then processes whole
  sequences and caches nothing.
  """
  if not size(cache.keys):
    return cache
  if cache.logs:
    raise ValueError(
      'a recurrent model was fed tokens twice without a commit in between: '
      'commit after each pass, even if no token is kept'
    )
  num_new = size(keys)
  first = after[:, :1, None, None]
  # 0 times NaN or infinity is NaN, and would be stored.
  wait = jnp.where(jnp.isfinite(first), 0 * first, 0)

  def write_all(buffers, updates):
    late = lambda entries: jax.tree.map(
      lambda x: x + wait.astype(x.dtype), entries
    )
    return tuple(
      _write_layer(buffer, late(update), cache.length, i in cache.rings, count)
      for i, (buffer, update) in enumerate(zip(buffers, updates, strict=True))
    )

  return dataclasses.replace(
    cache,
    keys=write_all(cache.keys, keys),
    values=write_all(cache.values, values),
    length=cache.length + num_new,
    logs=logs,
  )


def widen(new: New, num_tokens: int) -> New:
  """Pads `new` to `num_tokens` tokens with zeros, which a commit drops."""
  more = lambda x: jnp.pad(
    x, ((0, 0), (0, 0), (0, num_tokens - x.shape[2]), (0, 0))
  )
  return _mapped(new, more, lambda log: gated_delta.widen(log, num_tokens))


def along(new: New, path: Array) -> New:
  """Returns the tokens of `new` at the indices path [B, P], as a chain."""
  take = lambda leaf: _take(leaf, path)
  return _mapped(new, take, lambda log: gated_delta.along(log, path))


def _mapped(new, of_leaf, of_log):
  return dataclasses.replace(
    new,
    keys=jax.tree.map(of_leaf, new.keys),
    values=jax.tree.map(of_leaf, new.values),
    logs=tuple(log and of_log(log) for log in new.logs),
  )


def write(buffer: Array, update: Array, start: Array, axis: int = 0) -> Array:
  """Writes T entries into each row of buffer [B, ...], from start [B] on.

  `axis` is the axis of the entries within a row. The caller leaves room for T
  entries: a start that is too large is moved back.
  """
  put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
  return _each_row(put, buffer, update, start)


def commit(cache: KVCache, length: Array, path: Array | None = None) -> KVCache:
  """Keeps the first length [B] tokens of each row.

  With path [B, P], the entries at those indices are first moved next to each
  other, starting at the position of the first. Recurrent layers cannot go back
  further than to the tokens before the last `append`.
  """
  keys, values, states = cache.keys, cache.values, cache.states
  if path is not None:
    keys, values = (
      tuple(_move(x, path, i in cache.rings) for i, x in enumerate(entries))
      for entries in (keys, values)
    )
  if cache.logs:
    num_new = jax.tree.leaves(cache.logs)[0].shape[1]
    before = cache.length - num_new
    nodes = None if path is None else path - before[:, None]
    states = tuple(
      None
      if state is None or log is None
      else gated_delta.commit(state, log, length - before, nodes)
      for state, log in zip(states, cache.logs, strict=True)
    )
  return dataclasses.replace(
    cache, keys=keys, values=values, length=length, states=states, logs=()
  )


def _move(entries, path, is_ring):
  if entries is None:
    return None
  index = path[:, 1:]
  if is_ring:
    index %= size(entries)
  taken = jax.tree.map(lambda leaf: _take(leaf, index), entries)
  return _write_layer(entries, taken, path[:, 0] + 1, is_ring)


def _take(leaf, index):
  """Takes entries [B, H, n, D] of [B, H, S, D] at index [B, n].

  Each head takes its own. For one gather of all heads, a TPU lays out the whole
  cache anew, with the heads after the tokens.
  """
  batch, num_heads = leaf.shape[:2]
  index = jnp.broadcast_to(index[:, None], (batch, num_heads, index.shape[1]))
  heads = sharding.Axis('kv_heads', num_heads)
  index = sharding.constrain(index, 'batch', heads, None)
  return jax.vmap(jax.vmap(lambda head, at: jnp.take(head, at, axis=0)))(
    leaf, index
  )


def _write_layer(entries, update, start, is_ring, count=None):
  if entries is None:
    return None
  if not is_ring:
    put = lambda x, new: write(x, new, start, 1)
  elif count is not None:
    put = lambda x, new: jax.vmap(_write_last)(x, new, start, count)
  else:
    room, num_new = size(entries), size(update)
    if num_new > room:
      raise ValueError(
        f'{num_new} tokens are fed to a ring with room for {room}: set max_new '
        'of `init_cache` to the most tokens that are fed before a commit'
      )
    put = lambda x, new: _each_row(_write_round, x, new, start % room)
  return jax.tree.map(put, entries, update)


def _write_last(buffer, update, start, count):
  """Writes the first `count` of [H, T, D] into a row's ring [H, S, D].

  Each entry gets the last token that belongs into it, so all entries are
  rewritten; `_write_round` rewrites fewer.
  """
  room, num_new = buffer.shape[1], update.shape[1]
  last = count - 1
  place = last - (last + start - jnp.arange(room)) % room
  new = jnp.take(update, jnp.clip(place, 0, num_new - 1), axis=1)
  return jnp.where((place >= 0)[:, None], new, buffer)


def _write_round(buffer, update, start):
  """Writes [H, T, D] into a row's ring [H, S, D], wrapping around at its end.

  Rewrites two slices of T entries: the last one that begins no later than the
  updates, and the first of the ring. Entries without an update are kept.
  """
  size, num_new = buffer.shape[1], update.shape[1]
  for begin in (jnp.minimum(start, size - num_new), jnp.zeros_like(start)):
    place = (begin + jnp.arange(num_new) - start) % size
    new = jnp.take(update, jnp.minimum(place, num_new - 1), axis=1)
    old = jax.lax.dynamic_slice_in_dim(buffer, begin, num_new, axis=1)
    merged = jnp.where((place < num_new)[:, None], new, old)
    buffer = jax.lax.dynamic_update_slice_in_dim(buffer, merged, begin, axis=1)
  return buffer


def _each_row(write_row, buffer, update, start):
  if buffer.shape[0] == 1:  # vmap would make the update a slower scatter
    return write_row(buffer[0], update[0], start[0])[None]
  return jax.vmap(write_row)(buffer, update, start)
