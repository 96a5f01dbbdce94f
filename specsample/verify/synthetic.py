"""A lossy stand-in for hardware studies with random weights.

Two networks with random weights agree on nothing, so every rule would reject
their drafts. This rule accepts drafts at a given rate whatever the
probabilities, so that a round takes as long as with trained networks of that
acceptance rate. The emitted tokens follow no particular distribution.
"""

import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(rule.ChainRule):
  """Accepts each draft with probability `rate` until the first rejection.

  If no stop condition cuts rounds short, the expected number of tokens per
  round is (1 - rate^(K + 1)) / (1 - rate). The token after the accepted drafts
  is drawn from the target's distribution at its position.
  """

  rate: settings.Share
  lossless = False

  def _law(self, draft, target_probs):
    accept = jnp.where(draft.tokens >= 0, self.rate, 0)
    accept = accept.astype(target_probs.dtype)
    return Law(stop=rule.stop_at_rejection(accept), next=target_probs)
