"""Lattices: a few candidates for each position, and how they follow each other.

The most likely prefixes of a lattice make the tree of DDTree (2604.12989),
which has the same candidates after every token; here they may depend on it.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.types import Array


@types.pytree
class Lattice:
  """C candidates for each of K positions, and the probability of every step."""

  ids: Array  # [B, K, C] int32, the target's; distinct within a position
  # [B, K, C, C] float32, at most 0: the log-probability of candidate j after
  # candidate i of the position before, at [:, :, i, j]. For position 0, which
  # follows the pending token, it is the same for all i. -inf or NaN where the
  # drafter has nothing to offer.
  log_probs: Array
  # [B, K, C] float32, as in `types.Signals`, after each candidate of the
  # position before; None without an estimate.
  confidence: Array | None = None


class LatticeDrafter(Protocol):
  """A drafter that finds the candidates for all positions in one pass."""

  num_draft_tokens: int  # K

  def lattice(self, params, tokens, length, state, num_candidates):
    """Returns the lattice after the pending tokens.

    The first arguments are those of `types.Drafter.propose`. Log-probabilities
    may be approximate: they only choose the tree, which is a point mass.

    Raises:
      ValueError: the drafter chooses among fewer than `num_candidates` tokens
        at a position.
    """


@types.pytree
class Prefixes:
  """The N most likely prefixes of a lattice, each named by its last step."""

  score: Array  # [B, N] float32, log-probabilities in decreasing order
  # [B, N] int32, where the step is in `Lattice.log_probs[b].ravel()`.
  step: Array
  # [B, N] int32, the number of the prefix without its last step, counted from
  # 1; 0 is the empty one.
  parent: Array


def best_prefixes(log_probs: Array, num_prefixes: int) -> Prefixes:
  """Finds the N most likely prefixes, parents before their children.

  Among equally likely prefixes the shorter comes first, and then the one whose
  parent, and whose candidate, comes first. So the first n of them are the n
  most likely, and a tree, for every n. A prefix of probability 0 has parent 0.

  Args:
    log_probs: see `Lattice`.
    num_prefixes: N; there must be as many.
  """
  batch, depth, size, _ = log_probs.shape
  # Level by level: the N best prefixes of each, and of these the N best. On a
  # CPU this takes a third to a fifth of the time of N steps of a heap.
  score = sharding.zeros((batch, 1), jnp.float32, 'batch', None)
  last = sharding.zeros((batch, 1), jnp.int32, 'batch', None)
  found: list[Any] = []
  first = 0  # the number of the first prefix of the level before
  for position in range(min(depth, num_prefixes)):
    rows = _take(log_probs[:, position], last[..., None])
    scores = (score[..., None] + rows).reshape(batch, -1)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    count = min(num_prefixes, scores.shape[1])
    score, best = jax.lax.top_k(scores, count)
    before, candidate = best // size, best % size
    step = (position * size + _take(last, before)) * size + candidate
    found.append((score, step, first + before))
    first = 1 + sum(x[0].shape[1] for x in found[:-1])
    last = candidate
  scores, steps, parents = jax.tree.map(
    lambda *levels: jnp.concatenate(levels, axis=1), *found
  )
  # `top_k` takes the first of equal scores, which is never the child.
  score, kept = jax.lax.top_k(scores, num_prefixes)
  is_parent = kept[:, None] + 1 == _take(parents, kept)[..., None]
  number = jnp.where(is_parent, jnp.arange(1, num_prefixes + 1), 0)
  return Prefixes(
    score=score,
    step=_take(steps, kept),
    parent=jnp.where(score > -jnp.inf, jnp.sum(number, axis=-1), 0),
  )


def _take(x, index):
  return jnp.take_along_axis(x, index, axis=1)
