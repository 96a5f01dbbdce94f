"""The token rule: accept each draft in turn, stop at the first rejection.

Leviathan et al., 2211.17192, Algorithm 1; Chen et al., 2302.01318, Algorithm 2
(which calls the target q).
"""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Chain:
  """Accepts draft i with probability min(1, target / draft)."""

  lossless = True
  positional = False
  draft_laws = rule.CHAIN_LAWS

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [K + 1, V].

    After a rejection the next token follows (target - draft)+, normalised;
    after K accepted drafts, the target.
    """
    rule.check_chain('chain', draft, self.draft_laws)
    draft_probs = rule.draft_probs(draft, target_probs)
    accept = jnp.minimum(
      rule.ratio(
        rule.of_tokens(target_probs[:-1], draft.tokens),
        rule.of_tokens(draft_probs, draft.tokens),
      ),
      1,
    )
    residual = jnp.maximum(target_probs[:-1] - draft_probs, 0)
    return Law(
      stop=rule.stop_at_rejection(accept),
      next=jnp.concatenate(
        [rule.normalise(residual, target_probs[:-1]), target_probs[-1:]]
      ),
    )

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))


chain = Chain()
