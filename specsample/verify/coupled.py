"""The coupled rule: drafter and target share Gumbel noise at each position.

Both take argmax(log probability + noise[position]), and drafts are kept for as
long as the two agree. Every emitted token is the target's choice, so for any
drafter and any K the output equals plain sampling under the same key (Daliri et
al., 2408.07978).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import types
from specsample.types import Array, Draft, Verdict
from specsample.verify import rule
from specsample.verify.chain import chain


@dataclasses.dataclass(frozen=True)
class Coupled(rule.ChainRule):
  """Keeps drafts while they equal the target's own draw at their position."""

  lossless = True
  positional = True

  def _law(self, draft, target_probs):
    """See `rule.Rule`; the law is that of a draft that used no noise.

    If drafts were drawn with the shared noise, the verdict depends on that
    noise and not on the draft tokens alone.
    """
    if draft.kind is not types.DraftKind.POINT_MASS:
      raise ValueError(
        f'Coupled.law is not exact for drafts of kind {draft.kind.value!r}: '
        'give a point mass'
      )
    return chain.law(draft, target_probs)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Returns the verdict under noise keys [K + 1], one per position."""
    self.check(draft)
    chosen = jax.vmap(sampling.draw_coupled)(key, target_probs)
    agrees = (chosen[:-1] == draft.tokens).astype(jnp.int32)
    num_accepted = jnp.sum(jnp.cumprod(agrees))
    return Verdict(num_accepted=num_accepted, next_token=chosen[num_accepted])


coupled = Coupled()
