"""The coupled rule: drafter and target share Gumbel noise by position.

Both take argmax(log probability + noise[position]); a draft is kept while the
two agree. What is emitted is always the target's choice, so the output equals
plain sampling under the same key for any drafter and any K (Daliri et al.,
2408.07978).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import types
from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule
from specsample.verify.chain import chain


@dataclasses.dataclass(frozen=True)
class Coupled:
  """Keeps drafts while they equal the target's own draw at their position."""

  lossless = True
  positional = True
  draft_laws = rule.CHAIN_LAWS

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict of a draft that saw no noise.

    For a point mass only: drafts drawn with the shared noise determine the
    verdict together with that noise, not by their values alone.

    Raises:
      ValueError: a sampled draft.
    """
    rule.check_chain(
      'coupled.law', draft, frozenset([types.DraftLaw.POINT_MASS])
    )
    return chain.law(draft, target_probs)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """The verdict under noise keys [K + 1], one a position."""
    rule.check_chain('coupled', draft, self.draft_laws)
    chosen = jax.vmap(sampling.draw_coupled)(key, target_probs)
    agrees = (chosen[:-1] == draft.tokens).astype(jnp.int32)
    num_accepted = jnp.sum(jnp.cumprod(agrees))
    return Verdict(num_accepted=num_accepted, next_token=chosen[num_accepted])


coupled = Coupled()
