"""Lenience: a lossy variant of the token rule that accepts more drafts.

Leviathan et al., 2211.17192, appendix A.5.
"""

import dataclasses

from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lenient(rule.ChainRule):
  """Accepts draft token x with probability min(1, p(x) / (lenience q(x))).

  p is the target's distribution and q the drafter's. The only guarantee is that
  no token is emitted with more than 1 / lenience times its probability under
  the target; lenience 1 is the token rule. If the target is greedy, p(x) is 0
  or 1 and lenience changes nothing. After a rejection the next token is drawn
  from (p - q)+, normalised; after K accepted drafts it is drawn from p.
  """

  lenience: rule.PositiveShare
  lossless = False

  def _law(self, draft, target_probs):
    return rule.token_by_token(draft, target_probs, self.lenience)
