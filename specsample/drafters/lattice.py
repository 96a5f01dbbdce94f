"""Lattices: a few candidates for each position, and how they follow each other.

The most likely prefixes of a lattice make the tree of DDTree (2604.12989),
which has the same candidates after every token; here they may depend on it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import signals as signals_lib
from specsample.drafters import wrapper
from specsample.types import Array, Draft, DraftKind


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
    rows = indexing.at(log_probs[:, position], last)
    scores = (score[..., None] + rows).reshape(batch, -1)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    count = min(num_prefixes, scores.shape[1])
    score, best = jax.lax.top_k(scores, count)
    before, candidate = best // size, best % size
    step = (position * size + indexing.at(last, before)) * size + candidate
    found.append((score, step, first + before))
    first = 1 + sum(x[0].shape[1] for x in found[:-1])
    last = candidate
  scores, steps, parents = jax.tree.map(
    lambda *levels: jnp.concatenate(levels, axis=1), *found
  )
  # `top_k` takes the first of equal scores, which is never the child.
  score, kept = jax.lax.top_k(scores, num_prefixes)
  is_parent = kept[:, None] + 1 == indexing.at(parents, kept)[..., None]
  number = jnp.where(is_parent, jnp.arange(1, num_prefixes + 1), 0)
  return Prefixes(
    score=score,
    step=indexing.at(steps, kept),
    parent=jnp.where(score > -jnp.inf, jnp.sum(number, axis=-1), 0),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatticeTree(wrapper.Wrapper):
  """A drafter of the N most likely prefixes of its drafter's lattice.

  Nodes come in the order of their paths' probabilities, parents before their
  children. So the first n nodes are the best tree of n nodes, for every n. The
  tree depends on the text alone, so it is a point mass.

  The signals are of the lattice's own log-probabilities. Their entropy leaves
  out the tokens that are not candidates.

  Attributes:
    drafter: gives a lattice of K positions.
    num_draft_tokens: N.
    candidates: C, for each position. With fewer than N, the tree may lack nodes
      that are more likely than some of its own.
  """

  drafter: Any  # has a method `lattice`, as `DFlash` does
  num_draft_tokens: fields.DraftLength
  candidates: settings.Count = 16

  def _check(self):
    checks.has(
      'LatticeTree.drafter',
      self.drafter,
      ('lattice',),
      'give one that has a lattice, DFlash, DFlash2 or DSpark; DynamicTree '
      'makes trees with others',
    )
    positions = self.drafter.num_draft_tokens
    most = sum(self.candidates ** (d + 1) for d in range(positions))
    if self.num_draft_tokens > most:
      raise ValueError(
        f'num_draft_tokens is {self.num_draft_tokens}, but {self.candidates} '
        f'candidates for each of {positions} positions make only {most} nodes: '
        'lower num_draft_tokens or raise candidates'
      )

  @property
  def depth(self) -> int:
    """The length of the longest path, the most drafts that a round keeps."""
    return min(self.drafter.num_draft_tokens, self.num_draft_tokens)

  def propose(self, params, draw, warp, tokens, length, state):
    del draw, warp
    found = self.drafter.lattice(params, tokens, length, state, self.candidates)
    return self._best(found), state

  def _best(self, found):
    num_nodes, size = self.num_draft_tokens, self.candidates
    best = best_prefixes(found.log_probs, num_nodes)
    # The step is to `candidate` of a position, after another of the one before.
    before, candidate = best.step // size, best.step % size
    rows = _take_steps(found.log_probs, before)
    chosen = jnp.take_along_axis(rows, candidate[..., None], axis=-1)
    of_steps = lambda x: _take_steps(x, before)
    confidence = jax.tree.map(of_steps, found.confidence)
    ids = _take_steps(found.ids, before // size * size + candidate)
    return Draft(
      tokens=jnp.where(jnp.isfinite(best.score), ids, -1),
      probs=None,
      kind=DraftKind.POINT_MASS,
      parents=best.parent,
      depth=self.depth,
      num_children=(min(size, num_nodes),) * (num_nodes + 1),
      signals=signals_lib.of_log_probs(rows, chosen[..., 0], confidence),
    )


def _take_steps(x, index):
  """Returns entries of x [B, K, C, ...], whose position is index // C."""
  flat = x.reshape(len(x), -1, *x.shape[3:])
  return indexing.at(flat, index)
