"""The text so far in the draft model's own tokens, called pieces."""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.types import Array


@types.pytree
class Pieces:
  """The pieces of each row, and a cache that holds some of them."""

  cache: types.Cache
  ids: Array  # [B, C + slack] int32, including pieces fed as drafts
  # [B] int32, pieces of the text so far; C + 1 if there are more than C.
  count: Array
  num_known: Array  # [B] int32, leading cache entries that match `ids`
  length: Array  # [B] int32, tokens whose pieces are in `ids`


def append(
  state: Pieces, table: Array, tokens: Array, count: Array, room: int
) -> Pieces:
  """Appends the pieces of more tokens.

  Pieces fed as drafts stay known as long as the text agrees with them.

  Args:
    state: of B rows.
    table: [V, P] int32, the pieces of each token, -1 for none.
    tokens: [B, T]. count: [B], how many of them are new.
    room: C, the most pieces of a row that are kept.
  """
  places = sharding.of_new('batch', None, None)
  new = table.at[tokens].get(out_sharding=places)  # [B, T, P]
  is_new = jnp.arange(tokens.shape[1]) < count[:, None]
  is_piece = ((new >= 0) & is_new[..., None]).reshape(len(tokens), -1)
  index = state.count[:, None] + jnp.cumsum(is_piece, axis=1) - 1
  size = state.ids.shape[1]
  index = jnp.where(is_piece & (index < room), index, size)
  ids = write(state.ids, new.reshape(len(tokens), -1), index)
  total = state.count + jnp.sum(is_piece, axis=1)
  total = jnp.minimum(total, room + 1).astype(jnp.int32)
  differs = jnp.where(ids != state.ids, jnp.arange(size), size)
  num_known = jnp.minimum(state.num_known, jnp.min(differs, axis=1))
  return dataclasses.replace(
    state,
    ids=ids,
    count=total,
    num_known=jnp.minimum(num_known, total),
    length=state.length + count,
  )


def take(rows: Array, start: Array, width: int) -> Array:
  """Returns `width` entries of rows [B, S] from start [B] on."""
  of_row = lambda row, i: jax.lax.dynamic_slice(row, (i,), (width,))
  return jax.vmap(of_row)(rows, start)


def write(rows: Array, values: Array, index: Array) -> Array:
  """Writes values [B, n] into rows [B, S] at index [B, n]; S is dropped."""
  of_row = lambda row, values, index: row.at[index].set(values, mode='drop')
  return jax.vmap(of_row)(rows, values, index)
