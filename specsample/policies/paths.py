"""Sums and ranks along the paths of one row's draft."""

import jax.numpy as jnp

from specsample import drafts
from specsample.types import Array, Draft


def along(draft: Draft, values: Array) -> Array:
  """Sums values [N] along the path to each node, itself included: [N]."""
  before = drafts.on_the_way(draft)[1:]
  return jnp.sum(jnp.where(before, values, 0), axis=-1)


def ranks(draft: Draft, scores: Array) -> Array:
  """Returns how many nodes score more than each: [N] int32, from scores [N].

  Missing nodes come last. Ties go to the first node, so that a node whose score
  is at most its parent's is never ahead of it.
  """
  scores = jnp.where(draft.tokens >= 0, scores, -jnp.inf)
  number = jnp.arange(scores.size)
  is_better = (scores > scores[:, None]) | (
    (scores == scores[:, None]) & (number < number[:, None])
  )
  return jnp.sum(is_better, axis=1, dtype=jnp.int32)
