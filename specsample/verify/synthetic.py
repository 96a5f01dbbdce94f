"""A lossy stand-in for hardware studies with random weights.

Two networks of random weights agree on nothing, so no rule keeps their drafts.
This one keeps them at a stated rate, whatever the probabilities, which makes
the time of a round that of trained networks with that acceptance. What it
emits is distributed as nothing in particular.
"""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
  """Keeps each draft with probability `rate`, until the first that fails.

  Without a stop, E[tokens a round] = (1 - rate^(K + 1)) / (1 - rate).
  """

  rate: float
  lossless = False
  positional = False
  draft_laws = rule.CHAIN_LAWS

  def __post_init__(self):
    """Refuses what is no probability."""
    if not 0 <= self.rate <= 1:
      raise ValueError(
        f'the synthetic acceptance rate is {self.rate}: give a probability, '
        '0 to 1'
      )

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [K + 1, V].

    The token after the kept drafts follows the target's distribution there.
    """
    rule.check_chain('synthetic', draft, self.draft_laws)
    accept = jnp.where(draft.tokens >= 0, self.rate, 0)
    accept = accept.astype(target_probs.dtype)
    return Law(stop=rule.stop_at_rejection(accept), next=target_probs)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))
