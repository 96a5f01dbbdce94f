"""The token rule: accept each draft in turn, stop at the first rejection.

Leviathan et al., 2211.17192, Algorithm 1; Chen et al., 2302.01318, Algorithm 2
(which calls the target q).
"""

import dataclasses

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Chain:
  """Accepts draft i with probability min(1, target / draft)."""

  lossless = True
  positional = False
  draft_laws = rule.CHAIN_LAWS

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [K + 1, V].

    After a rejection the next token follows (target - draft)+, normalised;
    after K accepted drafts, the target.
    """
    rule.check_chain('chain', draft, self.draft_laws)
    return rule.token_by_token(draft, target_probs)

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))


chain = Chain()
