"""Functions of the shape of a batch of drafts, chains or trees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import tree
from specsample.types import Array, Draft


def of_all_rows(parents: Any, batch_size: int) -> Array:
  """Returns parents [n] for each row of a batch: [B, n] int32."""
  row = jnp.asarray(parents, jnp.int32)
  rows = jnp.broadcast_to(row, (batch_size, row.size))
  return sharding.constrain(rows, 'batch', None)


def on_the_way(draft: Draft) -> Array:
  """Returns which draft tokens are on the path to each node.

  The result is [N + 1, N] or [B, N + 1, N]. A draft token is on the path to
  itself; none is on the path to node 0, the pending token.
  """
  num_drafts = draft.tokens.shape[-1]
  if draft.parents is None:
    return jnp.tri(num_drafts + 1, num_drafts, -1, dtype=bool)
  return tree.ancestors(draft.parents)[..., 1:]


def depths(draft: Draft) -> Array:
  """Returns the depth of each draft token, [N] or [B, N]; 1 to N on a chain."""
  return jnp.sum(on_the_way(draft)[..., 1:, :], axis=-1)


def depth(draft: Draft) -> Array:
  """Returns the length of the longest drafted path, [B]."""
  drafted = jnp.where(draft.tokens >= 0, depths(draft), 0)
  return jnp.max(drafted, axis=-1, initial=0)


def width(draft: Draft) -> Array:
  """Returns the number of the last drafted node, [B]; 0 if there is none."""
  numbers = jnp.arange(1, draft.tokens.shape[-1] + 1)
  return jnp.max(jnp.where(draft.tokens >= 0, numbers, 0), axis=-1, initial=0)


def prefixes(draft: Draft, num_nodes: int) -> Array:
  """Returns the draft tokens up to each of the first n nodes: [B, n, N].

  Others are -1. Node 0, the pending token, has none.
  """
  found = jnp.where(on_the_way(draft), draft.tokens[:, None], -1)
  return found[:, :num_nodes]


def all_on_the_way(draft: Draft, flags: Array) -> Array:
  """Returns whether flags [B, N] are set on the whole path to each, [B, N]."""
  before = on_the_way(draft)[..., 1:, :]
  return jnp.all(flags[..., None, :] | ~before, axis=-1)


def of_parents(draft: Draft, flags: Array) -> Array:
  """Returns flags [B, N] of each node's parent; True for the pending token."""
  of_nodes = jnp.pad(flags, ((0, 0), (1, 0)), constant_values=True)
  if draft.parents is None:
    return of_nodes[:, :-1]
  return jnp.take_along_axis(of_nodes, draft.parents, axis=1)


def exist(draft: Draft, vocab_size: int) -> Array:
  """Returns which draft tokens are smaller than `vocab_size`, [B, N].

  A verifier would read the last token's probability for any other token.
  """
  return draft.tokens < vocab_size


def cut(draft: Draft, keep: Array) -> Draft:
  """Keeps the draft tokens whose whole path is set in keep [B, N]."""
  keep = all_on_the_way(draft, keep)
  probs = draft.probs
  if probs is not None:
    probs = jnp.where(keep[..., None], probs, 0)
  return dataclasses.replace(
    draft, tokens=jnp.where(keep, draft.tokens, -1), probs=probs
  )


def follow_valid(draft: Draft, valid: Array) -> Draft:
  """Keeps the drafts whose ancestors are all `valid` [B, N + 1]."""
  before = valid[:, :-1]
  if draft.parents is not None:
    before = jnp.take_along_axis(valid, draft.parents, axis=1)
  return cut(draft, before)


def first(draft: Draft, width: int) -> Draft:
  """Returns the first `width` tokens of chains [B, N], or nodes of trees."""
  num_children = draft.num_children
  return dataclasses.replace(
    jax.tree.map(lambda x: x[:, :width], draft),
    num_children=None if num_children is None else num_children[: width + 1],
  )


def compact(draft: Draft) -> Draft:
  """Returns the same tree with its missing nodes moved to the end.

  Siblings keep their order, and children still come after their parents. The
  signals are dropped.
  """
  if draft.parents is None:
    return draft
  is_there = draft.tokens >= 0
  order = jnp.argsort(~is_there, axis=1, stable=True)
  take = lambda x: jnp.take_along_axis(
    x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1
  )
  number = jnp.cumsum(is_there, axis=1, dtype=jnp.int32)
  number = jnp.pad(number, ((0, 0), (1, 0)))
  parents = jnp.take_along_axis(number, take(draft.parents), axis=1)
  most = draft.num_children
  if most is not None:
    most = (max(most),) * len(most)
  return dataclasses.replace(
    draft,
    tokens=take(draft.tokens),
    probs=None if draft.probs is None else take(draft.probs),
    parents=jnp.where(take(is_there), parents, 0),
    num_children=most,
    signals=None,
  )
