"""The counterexample of DSpark, appendix A: when a budget of drafts is biased.

Two tokens A and B have the probabilities (.7, .3) under the target and (.5, .5)
under the drafter, which draws two tokens. It trusts the first one to .8, and
the second one to .9 after A and not at all after B.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from experiments.certificate.planted import drafters
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.policies import filters
from specsample.policies import policy
from specsample.testing.hash_model import HashModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(HashModel):
  """A model with the same distribution after every string."""

  probs: tuple[float, ...]

  def unembed(self, params, hidden):
    """See `types.Model`."""
    del params
    logits = jnp.asarray([math.log(share) for share in self.probs])
    return jnp.broadcast_to(logits, (*hidden.shape[:-1], len(self.probs)))


TARGET = Fixed(vocab_size=2, probs=(0.7, 0.3))
DRAFT = Fixed(vocab_size=2, probs=(0.5, 0.5))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trusting(Chain):
  """A chain whose confidence in the second token depends on the first one."""

  def confidence(self, params, carry):
    """See `steps.Steps`."""
    del params
    first = carry.fed[:, :1]
    return jnp.where(first < 0, 0.8, jnp.where(first == 0, 0.9, 0.0))


@dataclasses.dataclass(frozen=True)
class EarlyStopping(policy.Filter):
  """Drafts while each draft token raises the expected tokens per second.

  Whether a token is drafted then depends on no token that comes after it.
  """

  speeds: tuple[float, ...] = (1.0, 0.5, 0.45)  # [K + 1], passes per second
  reads_token = False

  def passes(self, draft, state, over=False):
    """See `policy.Policy`."""
    del state, over
    promised = self.promised(draft)
    return promised[1:] > promised[:-1]

  def promised(self, draft):
    """Returns the expected tokens per second of 0, 1, ... K drafts, [K + 1]."""
    kept = jnp.cumprod(filters.confidence_of(draft, self))
    tokens = 1 + jnp.cumsum(jnp.pad(kept, (1, 0)))
    return tokens * np.asarray(self.speeds)


@dataclasses.dataclass(frozen=True)
class GlobalArgmax(EarlyStopping):
  """Drafts the number of tokens that promises the most, seen afterwards.

  Whether the first token is drafted then depends on the token itself, through
  the confidence in the second one.
  """

  def passes(self, draft, state, over=False):
    """See `policy.Policy`."""
    del state, over
    return jnp.arange(draft.tokens.size) < jnp.argmax(self.promised(draft))


def drafter(budget: policy.Policy) -> Adaptive:
  """Returns the drafter of the counterexample, with a budget.

  The budget sees whole drafts, because a wrapper that only forwards does not
  stop early. A budget that sees the draft grow cannot anticipate anything.
  """
  whole = drafters.Wrapper(drafter=_Trusting(model=DRAFT, num_draft_tokens=2))
  return Adaptive(drafter=whole, policies=(budget,))
