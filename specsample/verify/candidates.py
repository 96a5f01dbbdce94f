"""Candidate sets as tutorials describe them: a lossy rule.

The drafter names a few tokens, and the target takes the one that it likes best,
if it likes that one well enough. Only otherwise is a token drawn from the whole
vocabulary.
"""

import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample import types
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates(rule.Rule):
  """Keeps the likeliest of the first k children, if p of it >= threshold.

  p is the target's distribution. If no such child is likely enough, the next
  token is drawn from p. A child of probability p is thus kept always or never,
  so the output does not have the target's distribution: no token is emitted
  with more than 1 / threshold times its probability. If the target is greedy,
  the rule is exact, because p is 0 or 1.

  Attributes:
    k: how many children of a node are looked at, in their order.
    threshold: in (0, 1].
  """

  k: settings.Count = 5
  threshold: rule.PositiveShare = 0.3
  lossless = False
  draft_kinds = frozenset(types.DraftKind)

  def _law(self, draft, target_probs):
    parents = rule.parents(draft)
    own = rule.of_children(target_probs, draft)
    is_candidate = rule.siblings_before(parents) < self.k
    own = jnp.where(is_candidate & (draft.tokens >= 0), own, 0)
    are_siblings = parents == parents[:, None]
    best = jnp.max(jnp.where(are_siblings, own, 0), axis=1)
    is_kept = (own == best) & (own >= self.threshold)
    # The first of several that are equally likely.
    again = rule.is_sibling_before(parents) & is_kept
    accept = is_kept & ~jnp.any(again, axis=1)
    stop = rule.stop_in_tree(parents, accept.astype(target_probs.dtype))
    return Law(stop=stop, next=target_probs)
