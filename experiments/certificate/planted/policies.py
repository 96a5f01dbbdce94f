"""Policies with one mistake each: they decide by what they must not know.

The budget's is the counterexample of DSpark, appendix A. Two tokens A and B
have the probabilities (.7, .3) under the target and (.5, .5) under the drafter,
which draws two tokens. It trusts the first one to .8, and the second one to .9
after A and not at all after B.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from experiments.certificate.planted import drafters
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.policies import EarlyStopping
from specsample.policies import policy
from specsample.policies import TopNodes
from specsample.testing.hash_model import HashModel
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Anticipating(policy.Policy):
  """Leaves out a drawn token itself, instead of the tokens after it."""

  inner: Any  # a policy.Policy that reads the token
  reads_token = False

  def passes(self, draft, state, over=False):
    return self.inner.passes(draft, state, over)


@dataclasses.dataclass(frozen=True)
class LikeliestDrawn(policy.Policy):
  """Keeps the most likely of drawn siblings, as if they had not been drawn."""

  num_nodes: int
  reads_token = False

  def passes(self, draft, state, over=False):
    chosen = dataclasses.replace(draft, probs=None, kind=DraftKind.POINT_MASS)
    return TopNodes(self.num_nodes).passes(chosen, state, over)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(HashModel):
  """A model with the same distribution after every string."""

  probs: tuple[float, ...]

  def unembed(self, params, hidden):
    del params
    logits = jnp.asarray([math.log(share) for share in self.probs])
    return jnp.broadcast_to(logits, (*hidden.shape[:-1], len(self.probs)))


TARGET = Fixed(vocab_size=2, probs=(0.7, 0.3))
DRAFT = Fixed(vocab_size=2, probs=(0.5, 0.5))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trusting(Chain):
  """A chain whose confidence in the second token depends on the first one."""

  def confidence(self, params, carry):
    del params
    first = carry.fed[:, :1]
    return jnp.where(first < 0, 0.8, jnp.where(first == 0, 0.9, 0.0))


# Passes per second of rounds of 0, 1 and 2 drafts: 1, .5 and .45.
COSTS = (1.0, 1 / 0.5, 1 / 0.45)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalArgmax(EarlyStopping):
  """Drafts the number of tokens that promises the most, seen afterwards.

  Whether the first token is drafted then depends on the token itself, through
  the confidence in the second one.
  """

  def passes(self, draft, state, over=False):
    del state
    best = jnp.argmax(self.tokens_a_cost(draft, over))
    return jnp.arange(draft.tokens.size) < best


def drafter(budget: policy.Policy) -> Adaptive:
  """Returns the drafter of the counterexample, with a budget.

  The budget sees whole drafts, because a wrapper that only forwards does not
  stop early. A budget that sees the draft grow cannot anticipate anything.
  """
  whole = drafters.Wrapper(drafter=_Trusting(model=DRAFT, num_draft_tokens=2))
  return Adaptive(drafter=whole, policies=(budget,))
