"""The token rule: accepts drafts in turn and stops at the first rejection.

Leviathan et al., 2211.17192, Algorithm 1; Chen et al., 2302.01318, Algorithm 2
(where q denotes the target).
"""

import dataclasses

from specsample.types import Array, Draft, Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Chain(rule.Rule):
  """Accepts draft token x with probability min(1, p(x) / q(x)).

  p is the target's distribution and q the drafter's, both after the tokens
  before x.
  """

  lossless = True
  draft_kinds = rule.CHAIN_KINDS

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """Returns the verdict's distribution, given target_probs [K + 1, V].

    After a rejection the next token is drawn from the residual distribution
    (p - q)+, normalised; after K accepted drafts it is drawn from p.
    """
    rule.check_chain('chain', draft, self.draft_kinds)
    return rule.token_by_token(draft, target_probs)


chain = Chain()
