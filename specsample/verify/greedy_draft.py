"""Greedy draft sampling: the most likely tokens, and one drawn from the rest.

Hu et al., 2502.18779, section 5, applied at each node of a tree.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import types
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class GreedyDraft(rule.Rule):
  """Tries the drawn child by the token rule, then its siblings by the residual.

  The drawn child x is accepted with probability min(1, p(x) / q(x)), where p is
  the target's distribution and q the one that x was drawn from. If x is
  rejected, the token is drawn from (p - q)+, normalised; if it is one of the
  other children, that child is kept as a draft.
  """

  lossless = True
  draft_kinds = frozenset([types.DraftKind.TOP_AND_SAMPLED])

  def _law(self, draft, target_probs):
    parents, tokens = rule.parents(draft), draft.tokens
    draft_probs = rule.draft_probs(draft, target_probs)
    # If the drawn child was cut, the last of the most likely ones takes its
    # place, as if drawn from a distribution with a single token.
    is_there = tokens >= 0
    is_later = rule.is_sibling_before(parents).T & is_there
    is_drawn = is_there & ~jnp.any(is_later, axis=1)
    drawn = rule.child_rows(parents, draft_probs, is_drawn)  # [N + 1, V]
    residual = rule.normalise(
      jnp.maximum(target_probs - drawn, 0), target_probs
    )
    own = rule.ratio(
      rule.of_children(target_probs, draft),
      rule.of_tokens(draft_probs, tokens),
    )
    own = jnp.where(is_drawn, jnp.minimum(own, 1), 0)
    nodes = jnp.arange(parents.size + 1)
    children = parents == nodes[:, None]  # [N + 1, N]
    of_parent = jnp.sum(jnp.where(children, own, 0), axis=1)[parents]
    others = (1 - of_parent) * rule.of_children(residual, draft)
    accept = jnp.where(is_drawn, own, others)

    kept = jnp.sum(jnp.where(children, accept, 0), axis=1)
    others = rule.without_children(residual, draft)
    return Law(
      stop=_reached(parents, accept) * jnp.maximum(1 - kept, 0),
      next=rule.normalise(others, residual),
    )


greedy_draft = GreedyDraft()


def _reached(parents, accept):
  """Returns the probability [N + 1] of keeping the drafts up to each node."""
  # Derived from `accept`: a loop mapped over a sharded batch cannot start from
  # a constant.
  start = jnp.pad(0 * accept, (1, 0)) + 1
  visit = lambda i, reached: reached.at[i + 1].set(
    reached[parents[i]] * accept[i]
  )
  return jax.lax.fori_loop(0, parents.size, visit, start)
