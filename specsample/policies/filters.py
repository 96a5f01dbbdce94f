"""Stateless filters that choose which drafts are worth verifying.

They all read the drafter's own `types.Signals`, so that they mean the same at
every temperature.
"""

import abc
import dataclasses

import jax.numpy as jnp

from specsample import settings
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
