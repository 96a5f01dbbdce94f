"""Filters with one mistake each: they decide by what they must not know."""

import dataclasses
from typing import Any

from specsample.policies import policy
from specsample.policies import TopNodes
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Anticipating(policy.Filter):
  """Leaves out a drawn token itself, instead of the tokens after it."""

  inner: Any  # a policy.Policy that reads the token
  reads_token = False

  def passes(self, draft, state, over=False):
    """See `policy.Policy`."""
    return self.inner.passes(draft, state, over)


@dataclasses.dataclass(frozen=True)
class LikeliestDrawn(policy.Filter):
  """Keeps the most likely of drawn siblings, as if they had not been drawn."""

  num_nodes: int
  reads_token = False

  def passes(self, draft, state, over=False):
    """See `policy.Policy`."""
    chosen = dataclasses.replace(draft, probs=None, kind=DraftKind.POINT_MASS)
    return TopNodes(self.num_nodes).passes(chosen, state, over)
