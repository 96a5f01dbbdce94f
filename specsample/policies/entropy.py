"""Filters that stop drafting when the drafter's entropy is too high.

The entropy of the draft distribution gives a lower bound on the probability
that a token drawn from it is kept, and is known before the token is drawn.
"""

import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample import types
from specsample.policies import policy
from specsample.types import Array


@dataclasses.dataclass(frozen=True)
class SVIP(policy.Policy):
  """Drafts while the square root of the entropy is at most the threshold.

  The entropy is in nats (Zhang et al., 2411.18462).
  """

  threshold: settings.NotNegative = 1.0
  reads_token = False

  def passes(self, draft, state, over=False):
    del state, over
    return jnp.sqrt(self.signals(draft).entropy) <= self.threshold


@types.pytree
class AdaEDLState:
  """The state of AdaEDL for one row."""

  threshold: Array  # [] float32, threshold of the bound
  rate: Array  # [] float32, running acceptance rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaEDL(policy.Policy):
  """Drafts while 1 - sqrt(scale * entropy) is at least a running threshold.

  This is a lower bound on the probability that a token is kept. The threshold
  rises while the running acceptance rate is below `target_rate`, and falls
  otherwise (Agrawal et al., 2410.18351). It also falls in rounds without
  drafts. The paper has no such rounds: it always drafts a first token, whatever
  the bound.

  Attributes:
    scale: gamma, factor of the entropy in nats.
    threshold: lambda, in the first round.
    target_rate: alpha, the acceptance rate to aim for.
    step: epsilon, by which the threshold moves.
    rate_decay: beta_1, decay of the running acceptance rate.
    threshold_decay: beta_2, decay of the threshold.
  """

  scale: settings.NotNegative = 0.2
  threshold: settings.Share = 0.4
  target_rate: settings.Share = 0.8
  step: settings.Share = 0.05
  rate_decay: settings.Share = 0.5
  threshold_decay: settings.Share = 0.9
  reads_token = False

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return AdaEDLState(
      threshold=jnp.float32(self.threshold), rate=jnp.float32(self.target_rate)
    )

  def passes(self, draft, state, over=False):
    del over
    entropy = self.signals(draft).entropy
    return 1 - jnp.sqrt(self.scale * entropy) >= state.threshold

  def update(self, drafted, kept, state, over):
    del over
    mix = lambda decay, old, new: decay * old + (1 - decay) * new
    rate = mix(self.rate_decay, state.rate, kept / jnp.maximum(drafted, 1))
    rate = jnp.where(drafted > 0, rate, state.rate)
    # In rounds without drafts, nothing else would ever make it fall again.
    rises = (drafted > 0) & (rate < self.target_rate)
    moved = state.threshold + jnp.where(rises, self.step, -self.step)
    threshold = mix(self.threshold_decay, state.threshold, moved)
    return AdaEDLState(threshold=jnp.clip(threshold, 0, 1), rate=rate)
