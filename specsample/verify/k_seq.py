"""K-SEQ: i.i.d. siblings, each kept at the same discounted rate.

SpecTr (Sun et al., 2310.15141, Algorithm 2), at each node of a tree.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class KSeq:
  """Accepts a child with probability min(1, target / (rho draft)).

  rho is the least discount for which what is accepted of k children is no more
  than the target has: 1 - (1 - beta)^k = rho beta, where beta = sum_x
  min(draft, target / rho) is the probability that a child is accepted. With one
  child it is the token rule.
  """

  lossless = True
  positional = False
  draft_laws = frozenset([types.DraftLaw.SAMPLED])

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [N + 1, V]."""
    rule.check_law('k_seq', draft, self.draft_laws)
    if not draft.tokens.size:
      return rule.no_drafts(target_probs)
    parents = rule.parents(draft)
    draft_probs = rule.draft_probs(draft, target_probs)
    is_there = draft.tokens >= 0
    first = rule.siblings_before(parents) == 0
    # A node that never has a child has no discount.
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

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))


k_seq = KSeq()


def _discount(target_probs, drawn, count):
  """rho [n] in [1, k]; k = count [n], 1 where there is no child."""
  low = jnp.ones(count.size, target_probs.dtype)
  high = jnp.maximum(count, 1).astype(low.dtype)

  def halve(_, bounds):
    low, high = bounds
    middle = (low + high) / 2
    kept = jnp.minimum(drawn, target_probs / middle[:, None])
    beta = jnp.sum(kept, axis=-1)
    is_enough = 1 - (1 - beta) ** count <= middle * beta
    return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

  # Halvings of [1, k] to the last bit. The upper end accepts no more than the
  # target has.
  steps = jnp.finfo(low.dtype).nmant + 1
  return jax.lax.fori_loop(0, steps, halve, (low, high))[1]
