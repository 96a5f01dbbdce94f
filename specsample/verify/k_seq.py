"""K-SEQ: i.i.d. siblings, each accepted at the same discounted rate.

SpecTr (Sun et al., 2310.15141, Algorithm 2), applied at each node of a tree.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class KSeq(rule.Rule):
  """Accepts a child x with probability min(1, p(x) / (rho q(x))).

  p is the target's distribution and q the one that the k children were drawn
  from. Let beta = sum_x min(q(x), p(x) / rho), the probability that a child is
  accepted. The discount rho is the smallest one for which no token is accepted
  with more than its probability under the target; it solves
  1 - (1 - beta)^k = rho beta. If all children are rejected, the next token is
  drawn from (p - min(q, p / rho) (1 - (1 - beta)^k) / beta)+, normalised. With
  one child this is the token rule.
  """

  lossless = True
  draft_kinds = frozenset([types.DraftKind.SAMPLED])

  def _law(self, draft, target_probs):
    parents = rule.parents(draft)
    draft_probs = rule.draft_probs(draft, target_probs)
    is_there = draft.tokens >= 0
    first = rule.siblings_before(parents) == 0
    # Only nodes that may have children need a discount.
    nodes = np.flatnonzero(rule.num_children(draft))
    target = jnp.take(target_probs, nodes, axis=0)
    drawn = rule.child_rows(parents, draft_probs, first)  # [N + 1, V]
    drawn = jnp.take(drawn, nodes, axis=0)
    count = jnp.sum((parents == nodes[:, None]) & is_there, axis=1)
    rho = _discount(target, drawn, count)

    kept = jnp.minimum(drawn, target / rho[:, None])
    beta = jnp.sum(kept, axis=-1)
    some = 1 - (1 - beta) ** count
    taken = kept * rule.ratio(some, beta)[:, None]
    residual = rule.normalise(jnp.maximum(target - taken, 0), target)

    of_parent = jnp.sum(
      jnp.where(parents == nodes[:, None], rho[:, None], 0), 0
    )
    accept = rule.ratio(
      rule.of_children(target_probs, draft) / of_parent,
      rule.of_tokens(draft_probs, draft.tokens),
    )
    return Law(
      stop=rule.stop_in_tree(parents, jnp.minimum(accept, 1)),
      next=target_probs.at[nodes].set(residual),
    )


k_seq = KSeq()


def _discount(target_probs, drawn, count):
  """Returns rho [n] in [1, k], where k is count [n]; 1 if there is no child."""
  low = jnp.ones(count.size, target_probs.dtype)
  high = jnp.maximum(count, 1).astype(low.dtype)

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    kept = jnp.minimum(drawn, target_probs / middle[:, None])
    beta = jnp.sum(kept, axis=-1)
    is_enough = 1 - (1 - beta) ** count <= middle * beta
    return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

  # Bisects [1, k] to the last bit. At the upper end no token is accepted with
  # more than its probability under the target.
  steps = jnp.finfo(low.dtype).nmant + 1
  return jax.lax.fori_loop(0, steps, halve, (low, high))[1]
