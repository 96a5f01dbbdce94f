"""Lenience: lossy, the token rule with an easier test.

Leviathan et al., 2211.17192, appendix A.5.
"""

import dataclasses

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lenient:
  """Accepts draft i with probability min(1, target / (lenience * draft)).

  No token is emitted with more than 1 / lenience of its probability under the
  target, which is all that is promised; 1 is the token rule. Where the target
  is greedy a draft has all of its probability or none, and nothing changes.
  """

  lenience: float
  lossless = False
  positional = False
  draft_laws = rule.CHAIN_LAWS

  def __post_init__(self):
    """Refuses what is no share."""
    if not 0 < self.lenience <= 1:
      raise ValueError(
        f'lenience is {self.lenience}: give a share, more than 0 and up to 1'
      )

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [K + 1, V].

    After a rejection the next token follows (target - draft)+, normalised;
    after K accepted drafts, the target.
    """
    rule.check_chain('lenient', draft, self.draft_laws)
    return rule.token_by_token(draft, target_probs, self.lenience)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))
