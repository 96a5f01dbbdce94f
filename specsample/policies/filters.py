"""Filters that choose which drafts are worth verifying.

They all read the drafter's own `types.Signals`, so that they mean the same at
every temperature.
"""

import abc
import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample import types
from specsample.policies import policy
from specsample.types import Array, Draft, DraftKind


@dataclasses.dataclass(frozen=True)
class _Threshold(policy.Policy, abc.ABC):
  """A filter of drafts whose probability is at least the threshold."""

  threshold: settings.Share

  @abc.abstractmethod
  def probability(self, draft: Draft) -> Array:
    """Returns the probability of each draft token that counts, [N]."""

  def passes(self, draft, state, over=False):
    del state, over
    return self.probability(draft) >= self.threshold


@dataclasses.dataclass(frozen=True)
class TokenProbability(_Threshold):
  """Continues after a draft if its probability is at least `threshold`."""

  reads_token = True

  def probability(self, draft):
    return jnp.exp(self.signals(draft).log_prob)


@dataclasses.dataclass(frozen=True)
class PathProbability(_Threshold):
  """Continues after a draft if its path has probability `threshold` or more."""

  reads_token = True

  def probability(self, draft):
    return jnp.exp(policy.along(draft, self.signals(draft).log_prob))


@dataclasses.dataclass(frozen=True)
class TopK(policy.Policy):
  """Continues after a draft if it is among the k most likely in its place."""

  k: settings.Count
  reads_token = True

  def passes(self, draft, state, over=False):
    del state, over
    return self.signals(draft).rank < self.k


@dataclasses.dataclass(frozen=True)
class LargestProbability(_Threshold):
  """Drafts while the most likely token has probability `threshold` or more.

  This probability is known before the token is drawn.
  """

  reads_token = False

  def probability(self, draft):
    return jnp.exp(self.signals(draft).max_log_prob)


@dataclasses.dataclass(frozen=True)
class Confidence(_Threshold):
  """Drafts while the confidence of a trained head is at least `threshold`."""

  reads_token = False

  def probability(self, draft):
    return self.confidence(draft)


@dataclasses.dataclass(frozen=True)
class ConfidenceProduct(_Threshold):
  """Drafts while the product of confidences is at least `threshold`.

  The factors are a trained head's estimates; their product is the probability
  that all tokens so far are kept. SpecDec++ (Huang et al., 2405.19715) stops
  when the probability of a rejection is too large, DSpark when that of keeping
  the whole draft is too small.
  """

  reads_token = False

  def probability(self, draft):
    return jnp.exp(policy.along(draft, jnp.log(self.confidence(draft))))


@dataclasses.dataclass(frozen=True)
class TopNodes(policy.Policy):
  """Keeps the `num_nodes` nodes of a tree whose paths are the most likely.

  This is exact only if the tree is a function of the text. Among siblings that
  were drawn, likely tokens were drawn more often, and keeping those is biased.
  """

  num_nodes: settings.Count
  reads_token = True

  def passes(self, draft, state, over=False):
    del state, over
    if draft.kind is not DraftKind.POINT_MASS:
      raise ValueError(
        'TopNodes chooses draft tokens by their own probability, but tokens of '
        f'kind {draft.kind.value!r} were drawn: draft point masses, for which '
        'it is exact, with Tree(kind=DraftKind.POINT_MASS) or DynamicTree'
      )
    scores = policy.along(draft, self.signals(draft).log_prob)
    return policy.ranks(draft, scores) < self.num_nodes


@dataclasses.dataclass(frozen=True)
class SVIP(policy.Policy):
  """Drafts while the square root of the entropy is at most the threshold.

  The entropy of the draft distribution, in nats, gives a lower bound on the
  probability that a token drawn from it is kept, and is known before the token
  is drawn (Zhang et al., 2411.18462).
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
