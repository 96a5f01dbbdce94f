"""Attention masks of new tokens, over a cache and over each other."""

import jax.numpy as jnp

from specsample import sharding
from specsample import tree
from specsample.types import Array


def causal(
  length: Array,
  num_new: int,
  size: int,
  window: int | None = None,
  begins: Array | None = None,
) -> Array:
  """Returns the mask of `num_new` tokens after length [B] cached ones.

  The mask is [B, T, S + T] bool, over the S cache entries and the T new tokens.
  Each new token sees the tokens so far, the new ones before it and itself; with
  `window`, only the last `window` of these; with `begins` [B, T], only those
  from its own begins on.
  """
  positions = length[:, None] + jnp.arange(num_new)  # [B, T]
  seen_at = jnp.concatenate([indices(length, size), positions], axis=1)
  seen_at = seen_at[:, None]
  first = 0 if begins is None else begins[..., None]
  mask = (seen_at >= first) & (seen_at <= positions[..., None])
  if window is not None:
    mask &= seen_at > positions[..., None] - window
  return mask


def of_tree(
  length: Array,
  num_new: int,
  size: int,
  parents: Array,
  window: int | None = None,
) -> tuple[Array, Array]:
  """Like `causal`, for new tokens that are the last nodes of a tree.

  Args:
    length: [B], the number of cached tokens, including the tree nodes before
      the new ones.
    num_new: T.
    size: S.
    parents: [B, W - 1] of the tree's W nodes, as in `types.Model.apply`.
    window: as in `causal`.

  Returns:
    The mask [B, T, S + T] bool, and the new tokens' positions [B, T].
  """
  num_nodes = parents.shape[1] + 1
  num_before = num_nodes - num_new
  ancestors = tree.ancestors(parents)
  depths = tree.depths(ancestors)  # [B, W]
  root = length[:, None] - num_before
  seen = ancestors[:, num_before:]  # [B, T, W]
  positions = root + depths[:, num_before:]
  seen_at = held = indices(length, size)
  is_token = held >= 0
  cached = jnp.broadcast_to(
    (is_token & (held < root))[:, None], (length.size, num_new, size)
  )
  if num_before:
    node = jnp.clip(held - root, 0, num_nodes - 1)
    is_node = is_token & (held >= root)
    of_node = jnp.take_along_axis(seen, node[:, None], axis=2)
    cached |= is_node[:, None] & of_node
    depth = jnp.take_along_axis(depths, node, axis=1)
    seen_at = jnp.where(is_node, root + depth, held)
  mask = jnp.concatenate([cached, seen[..., num_before:]], axis=2)
  if window is not None:
    seen_at = jnp.concatenate([seen_at, positions], axis=1)[:, None]
    mask &= seen_at > positions[..., None] - window
  return mask, positions


def indices(length: Array, size: int) -> Array:
  """Returns the token index [B, S] of each cache entry, negative if empty.

  The cache holds the first length [B] tokens. Token i is in entry i % S: a ring
  holds the last S tokens, and in a cache with room for all of them entry i
  holds token i.
  """
  entries = jnp.broadcast_to(jnp.arange(size), (length.size, size))
  entries = sharding.constrain(entries, 'batch', None)
  last = length[:, None] - 1
  return last - (last - entries) % max(size, 1)
