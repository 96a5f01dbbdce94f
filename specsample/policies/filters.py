"""Stateless filters that choose which drafts are worth verifying.

They all read the drafter's own `types.Signals`, so that they mean the same at
every temperature.
"""

import dataclasses

import jax.numpy as jnp

from specsample import checks
from specsample.policies import paths
from specsample.policies import policy
from specsample.types import Array, Draft, DraftKind


@dataclasses.dataclass(frozen=True)
class _Threshold(policy.Filter):
  """The setting of filters that compare a probability with a threshold."""

  threshold: float

  def __post_init__(self):
    """Refuses a threshold outside [0, 1]."""
    checks.share('threshold', self.threshold)


@dataclasses.dataclass(frozen=True)
class TokenProbability(_Threshold):
  """Continues after a draft if its probability is at least `threshold`."""

  reads_token = True

  def passes(self, draft, state, over=False):
    del state, over
    return jnp.exp(policy.signals_of(draft, self).log_prob) >= self.threshold


@dataclasses.dataclass(frozen=True)
class PathProbability(_Threshold):
  """Continues after a draft if its path has probability `threshold` or more."""

  reads_token = True

  def passes(self, draft, state, over=False):
    del state, over
    log_prob = policy.signals_of(draft, self).log_prob
    return jnp.exp(paths.along(draft, log_prob)) >= self.threshold


@dataclasses.dataclass(frozen=True)
class TopK(policy.Filter):
  """Continues after a draft if it is among the k most likely in its place."""

  k: int
  reads_token = True

  def __post_init__(self):
    """Refuses to keep nothing."""
    checks.count('k', self.k)

  def passes(self, draft, state, over=False):
    del state, over
    return policy.signals_of(draft, self).rank < self.k


@dataclasses.dataclass(frozen=True)
class LargestProbability(_Threshold):
  """Drafts while the most likely token has probability `threshold` or more.

  This probability is known before the token is drawn.
  """

  reads_token = False

  def passes(self, draft, state, over=False):
    del state, over
    largest = policy.signals_of(draft, self).max_log_prob
    return jnp.exp(largest) >= self.threshold


@dataclasses.dataclass(frozen=True)
class Confidence(_Threshold):
  """Drafts while the confidence of a trained head is at least `threshold`."""

  reads_token = False

  def passes(self, draft, state, over=False):
    del state, over
    return confidence_of(draft, self) >= self.threshold


@dataclasses.dataclass(frozen=True)
class ConfidenceProduct(_Threshold):
  """Drafts while the product of confidences is at least `threshold`.

  The factors are a trained head's estimates; their product is the probability
  that all tokens so far are kept. SpecDec++ (Huang et al., 2405.19715) stops
  when the probability of a rejection is too large, DSpark when that of keeping
  the whole draft is too small.
  """

  reads_token = False

  def passes(self, draft, state, over=False):
    del state, over
    log_confidence = jnp.log(confidence_of(draft, self))
    return jnp.exp(paths.along(draft, log_confidence)) >= self.threshold


@dataclasses.dataclass(frozen=True)
class TopNodes(policy.Filter):
  """Keeps the `num_nodes` nodes of a tree whose paths are the most likely.

  This is exact only if the tree is a function of the text. Among siblings that
  were drawn, likely tokens were drawn more often, and keeping those is biased.
  """

  num_nodes: int
  reads_token = True

  def __post_init__(self):
    """Refuses to keep nothing."""
    checks.count('num_nodes', self.num_nodes)

  def passes(self, draft, state, over=False):
    del state, over
    if draft.kind is not DraftKind.POINT_MASS:
      raise ValueError(
        'TopNodes chooses draft tokens by their own probability, but tokens of '
        f'kind {draft.kind.value!r} were drawn: draft point masses, for which '
        'it is exact, with Tree(kind=DraftKind.POINT_MASS) or DynamicTree'
      )
    scores = paths.along(draft, policy.signals_of(draft, self).log_prob)
    return paths.ranks(draft, scores) < self.num_nodes


def confidence_of(draft: Draft, of: policy.Policy) -> Array:
  """Returns a trained head's estimate for each draft, [N].

  Raises:
    ValueError: the drafter has no such head.
  """
  confidence = policy.signals_of(draft, of).confidence
  if confidence is None:
    raise ValueError(
      f"{type(of).__name__} reads a trained head's confidence, but the drafter "
      'has no such head: draft with DSpark, or choose LargestProbability'
    )
  return confidence
