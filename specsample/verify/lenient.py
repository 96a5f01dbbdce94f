"""Lenience: a lossy variant of the token rule that accepts more drafts.

Leviathan et al., 2211.17192, appendix A.5.
"""

import dataclasses

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lenient:
  """Accepts draft token x with probability min(1, p(x) / (lenience q(x))).

  p is the target's distribution and q the drafter's. The only guarantee is that
  no token is emitted with more than 1 / lenience times its probability under
  the target; lenience 1 is the token rule. If the target is greedy, p(x) is 0
  or 1 and lenience changes nothing.
  """

  lenience: float
  lossless = False
  positional = False
  draft_kinds = rule.CHAIN_KINDS

  def __post_init__(self):
    """Checks that `lenience` is in (0, 1]."""
    if not 0 < self.lenience <= 1:
      raise ValueError(
        f'lenience is {self.lenience}: give a share, more than 0 and up to 1'
      )

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """Returns the verdict's distribution, given target_probs [K + 1, V].

    After a rejection the next token is drawn from (p - q)+, normalised; after
    K accepted drafts it is drawn from p.
    """
    rule.check_chain('lenient', draft, self.draft_kinds)
    return rule.token_by_token(draft, target_probs, self.lenience)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    return rule.draw(key, draft, self.law(draft, target_probs))
