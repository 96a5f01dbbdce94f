"""What each new token may see: of a cache, and of the others that are new."""

import jax.numpy as jnp

from specsample import sharding
from specsample import tree
from specsample.types import Array


def causal(
  length: Array, num_new: int, size: int, window: int | None = None
) -> Array:
  """What each of `num_new` tokens behind length [B] cached ones may see.

  Returns [B, T, S + T] bool: of a cache of S entries the first `length`, of
  the new tokens itself and those before it; at most `window` tokens back.
  """
  new = jnp.arange(num_new)
  positions = length[:, None] + new  # [B, T]
  entries = jnp.broadcast_to(jnp.arange(size), (length.size, size))
  entries = sharding.constrain(entries, 'batch', None)
  is_cached = entries < length[:, None]
  seen_at = jnp.concatenate([entries, positions], axis=1)[:, None]
  exists = jnp.pad(is_cached, ((0, 0), (0, num_new)), constant_values=True)
  mask = exists[:, None] & (seen_at <= positions[..., None])
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
  """As `causal`, of new tokens that are the last nodes of a tree.

  Args:
    length: [B], of the cached ones, the nodes before the new ones included.
    num_new: T. size: S.
    parents: [B, W - 1] of the tree's W nodes, as `types.Model.apply`.
    window: as `causal`.

  Returns:
    [B, T, S + T] bool, and the new tokens' positions [B, T].
  """
  num_nodes = parents.shape[1] + 1
  num_before = num_nodes - num_new
  ancestors = tree.ancestors(parents)
  depths = tree.depths(ancestors)  # [B, W]
  root = length[:, None] - num_before
  seen = ancestors[:, num_before:]  # [B, T, W]
  positions = root + depths[:, num_before:]
  entries = jnp.broadcast_to(jnp.arange(size), (length.size, size))
  entries = sharding.constrain(entries, 'batch', None)
  cached = jnp.broadcast_to(
    (entries < root)[:, None], (length.size, num_new, size)
  )
  seen_at = entries
  if num_before:
    node = jnp.clip(entries - root, 0, num_nodes - 1)
    is_node = (entries >= root) & (entries < length[:, None])
    of_node = jnp.take_along_axis(seen, node[:, None], axis=2)
    cached |= is_node[:, None] & of_node
    depth = jnp.take_along_axis(depths, node, axis=1)
    seen_at = jnp.where(is_node, root + depth, entries)
  mask = jnp.concatenate([cached, seen[..., num_before:]], axis=2)
  if window is not None:
    seen_at = jnp.concatenate([seen_at, positions], axis=1)[:, None]
    mask &= seen_at > positions[..., None] - window
  return mask, positions
