"""Drafting the most likely tree, whose shape depends on the text.

EAGLE-2 (Li et al., 2406.16858): expand, then rerank.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import fields
from specsample.drafters import signals as signals_lib
from specsample.drafters import steps
from specsample.drafters import wrapper
from specsample.types import Array, Draft, DraftKind, Signals


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicTree(wrapper.Wrapper):
  """A drafter of the N candidates whose paths its drafter finds most likely.

  At each depth the `width` likeliest paths are extended, each by `width`
  tokens. The candidates that are kept form a tree, as no path is likelier than
  its beginning. The tree depends on the text alone, so it is a point mass.

  Attributes:
    drafter: drafts as many tokens as the tree is deep.
    num_draft_tokens: N.
    width: k, the paths that are extended and the tokens that follow each.
  """

  drafter: Any  # a steps.Steps
  num_draft_tokens: fields.DraftLength
  width: settings.Count = 10

  def _check(self):
    steps.check_branches(self.drafter)
    most = self.width + (self.depth - 1) * self.width**2
    if self.num_draft_tokens > most:
      raise ValueError(
        f'num_draft_tokens is {self.num_draft_tokens}, but width {self.width} '
        f'finds only {most} candidates down to depth {self.depth}: lower '
        'num_draft_tokens or raise width'
      )

  @property
  def depth(self) -> int:
    """The length of the longest path, the most drafts that a round keeps."""
    return self.drafter.num_draft_tokens

  def init(self, params, batch_size, max_length):
    """See `Drafter`: with room for extended nodes that are not kept."""
    room = max(0, self.depth * self.width - self.num_draft_tokens)
    num_extended = (self.depth - 1) * self.width
    return self.drafter.init_tree(
      params, batch_size, max_length + room, num_extended
    )

  def propose(self, params, draw, warp, tokens, length, state):
    del draw, warp
    batch, width = tokens.shape[0], self.width
    logits, carry = self.drafter.root(params, tokens, length, state)
    root = sharding.zeros((batch, 1), jnp.float32, 'batch', None)
    found = [self._candidates(params, logits, root, carry)]
    # The candidates that are extended, and their parents as `next` numbers
    # them.
    expanded = drafts.of_all_rows(range(width), batch)
    parents = drafts.of_all_rows([0] * width, batch)
    # The parent of each candidate, counted from 1; 0 is the pending token.
    before = [drafts.of_all_rows([0] * width, batch)]
    for depth in range(1, self.depth):
      ids, scores, _ = _join(found)
      chosen, scores = indexing.at(ids, expanded), indexing.at(scores, expanded)
      logits, carry = self.drafter.next(params, chosen, parents, carry)
      new = self._candidates(params, logits, scores, carry)
      before.append(jnp.repeat(expanded + 1, width, axis=1))
      _, best = jax.lax.top_k(new[1], width)
      expanded = ids.shape[1] + best
      first = 1 + (depth - 1) * width
      parents = jnp.concatenate([parents, first + best // width], axis=1)
      found.append(new)
    draft = self._best(_join(found), jnp.concatenate(before, axis=1))
    return draft, self.drafter.end(carry, state)

  def _candidates(
    self, params, logits, scores, carry
  ) -> tuple[Array, Array, Signals]:
    """Returns the k likeliest tokens after each of n paths: [B, n * k].

    Also returns their scores and signals, of the same shape.

    Args:
      params: the whole tree of parameters.
      logits: [B, n, V'].
      scores: [B, n] float32, the paths' log-probabilities.
      carry: the drafter's, of the same step.
    """
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    # NaN: the drafter has nothing to offer for now, all its logits are -inf.
    log_probs = jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
    steps.check_siblings(self.width, log_probs)
    values, ids = indexing.top_k(log_probs, self.width)
    confidence = self.drafter.confidence(params, carry)
    signals = signals_lib.of_top(log_probs, values, confidence)
    scores = values + scores[..., None]
    ids = self.drafter.target_ids(params, ids).astype(jnp.int32)
    flat = lambda x: x.reshape(x.shape[0], -1)
    return flat(ids), flat(scores), jax.tree.map(flat, signals)

  def _best(self, candidates, before) -> Draft:
    """Returns the tree of the likeliest candidates, parents before children."""
    ids, scores, signals = candidates
    # Among equals `top_k` takes the first, which never descends from another.
    _, kept = jax.lax.top_k(scores, self.num_draft_tokens)
    kept = jnp.sort(kept, axis=1)
    take = functools.partial(indexing.at, index=kept)
    # A parent's node number is the number of kept candidates up to it.
    number = jnp.sum(kept[:, None] < take(before)[..., None], axis=-1)
    return Draft(
      tokens=jnp.where(jnp.isfinite(take(scores)), take(ids), -1),
      probs=None,
      kind=DraftKind.POINT_MASS,
      parents=number.astype(jnp.int32),
      depth=self.depth,
      num_children=(self.width,) * (self.num_draft_tokens + 1),
      signals=jax.tree.map(take, signals),
    )


def _join(found):
  """Joins the tokens, scores and signals of all candidates so far: [B, C]."""
  return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)
