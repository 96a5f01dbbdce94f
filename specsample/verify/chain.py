"""The token rule: accepts drafts in turn and stops at the first rejection.

Leviathan et al., 2211.17192, Algorithm 1; Chen et al., 2302.01318, Algorithm 2
(where q denotes the target).
"""

import dataclasses

from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Chain(rule.ChainRule):
  """Accepts draft token x with probability min(1, p(x) / q(x)).

  p is the target's distribution and q the drafter's, both after the tokens
  before x. After a rejection the next token is drawn from the residual
  distribution (p - q)+, normalised; after K accepted drafts it is drawn from p.
  """

  lossless = True

  def _law(self, draft, target_probs):
    return rule.token_by_token(draft, target_probs)


chain = Chain()
