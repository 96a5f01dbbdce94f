"""Rows of a batch, in which several dialogues may follow one another.

A batch is packed if it has `starts` [B, D] int32: dialogue d of row b begins at
token starts[b, d], the first one at 0, and T stands for dialogues that a row
does not have. A token sees the tokens of its own dialogue only, its position
counts from the dialogue's first token, and no draft is learned across two
dialogues.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.types import Array


class Rows(NamedTuple):
  """The places of a batch at which something may be learned."""

  tokens: Array  # [B, A] int32
  mask: Array  # [B, A] bool, the tokens to learn
  positions: Array  # [B, A] int32, within the places of the token's dialogue

  def learned(self, count: int) -> Array:
    """Returns where the token `count` places later is to be learned, [B, A].

    It must be of the same dialogue.
    """
    return behind(self.mask & (self.positions >= count), count)

  def drafts(self, num_draft_tokens: int) -> Array:
    """Returns where the K drafts after each token are learned, [K, B, A]."""
    return jnp.stack([self.learned(i + 1) for i in range(num_draft_tokens)])

  def after_first(self, num_draft_tokens: int) -> Array:
    """Returns the same without the first tokens of dialogues.

    No vector of the target precedes them that a draft could be made from.
    """
    return self.drafts(num_draft_tokens) & (self.positions > 0)


def of(batch: Mapping[str, Array]) -> Rows:
  """Returns the tokens and the mask of a batch, at its `places` if it has them.

  Places of one dialogue are consecutive; see `crop`.
  """
  tokens, mask = crop(batch, batch['tokens']), crop(batch, batch['mask'])
  index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  index = sharding.constrain(index, 'batch', None)
  if 'starts' not in batch:
    return Rows(tokens, mask, index)
  begin = crop(batch, begins(batch))
  before = jnp.pad(begin, ((0, 0), (1, 0)))[:, :-1]
  first = jax.lax.cummax(jnp.where(begin != before, index, 0), axis=1)
  return Rows(tokens, mask, index - first)


def whole(batch: Mapping[str, Array]) -> Rows:
  """Returns the same at all places."""
  return of({name: x for name, x in batch.items() if name != 'places'})


def begins(batch: Mapping[str, Array]) -> Array:
  """Returns the place [B, T] int32 at which each token's dialogue begins."""
  tokens = batch['tokens']
  if 'starts' not in batch:
    return sharding.zeros(tokens.shape, jnp.int32, 'batch', None)
  starts = batch['starts'][..., None]
  return jnp.max(
    jnp.where(starts <= jnp.arange(tokens.shape[1]), starts, 0), axis=1
  )


def parents(batch: Mapping[str, Array]) -> Array | None:
  """Returns a packed batch as `parents` [B, T - 1] of `types.Model.apply`.

  Each token follows the one before it, and the first tokens of dialogues follow
  none. Returns None for a batch with one dialogue per row.
  """
  if 'starts' not in batch:
    return None
  place = jnp.arange(1, batch['tokens'].shape[1])
  return jnp.where(begins(batch)[:, 1:] == place, -1, place - 1)


def crop(batch: Mapping[str, Array], x: Array) -> Array:
  """Returns x [B, T, ...] at the `places` [B, A] of a batch that has them.

  The places of a dialogue are consecutive, from two tokens before its first
  answer up to its end; from T on x is 0. This avoids computing logits for a
  long prompt. Without `places` x is returned as it is.
  """
  if 'places' not in batch:
    return x
  places = batch['places']
  places = places.reshape(places.shape + (1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, places, axis=1, mode='fill', fill_value=0)


def behind(x: Array, count: int) -> Array:
  """Shifts x [B, T, ...] left by `count` positions along T; zeros follow."""
  padding = ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2)
  return jnp.pad(x, padding)[:, count:]
