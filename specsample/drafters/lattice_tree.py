"""Drafting the most likely tree of a lattice, found after one pass.

DDTree (2604.12989), over drafters of whole blocks.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specsample import checks
from specsample import settings
from specsample.drafters import fields
from specsample.drafters import lattice as lattice_lib
from specsample.drafters import signals as signals_lib
from specsample.drafters import wrapper
from specsample.types import Draft, DraftKind


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
    """See `types.Drafter`: one pass, whatever the tree."""
    del draw, warp
    found = self.drafter.lattice(params, tokens, length, state, self.candidates)
    return self._best(found), state

  def _best(self, found):
    num_nodes, size = self.num_draft_tokens, self.candidates
    best = lattice_lib.best_prefixes(found.log_probs, num_nodes)
    # The step is to `candidate` of a position, after another of the one before.
    before, candidate = best.step // size, best.step % size
    rows = _take(found.log_probs, before[..., None])
    chosen = jnp.take_along_axis(rows, candidate[..., None], axis=-1)
    signals = signals_lib.of_log_probs(rows, chosen[..., 0])
    if found.confidence is not None:
      confidence = _take(found.confidence, before)
      signals = dataclasses.replace(signals, confidence=confidence)
    ids = _take(found.ids, before // size * size + candidate)
    return Draft(
      tokens=jnp.where(jnp.isfinite(best.score), ids, -1),
      probs=None,
      kind=DraftKind.POINT_MASS,
      parents=best.parent,
      depth=self.depth,
      num_children=(min(size, num_nodes),) * (num_nodes + 1),
      signals=signals,
    )


def _take(x, index):
  """Returns entries of x [B, K, C, ...], whose position is index // C."""
  flat = x.reshape(len(x), -1, *x.shape[3:])
  return jnp.take_along_axis(flat, index, axis=1)
