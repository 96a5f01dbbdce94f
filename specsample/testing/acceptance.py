"""Theoretical acceptance of the rules, computed without their `.law`.

Everything is for the first round after the prompt. Each rule has a function
that returns [K]: the probability of keeping at least 1, 2, ..., K drafts. Their
sum is the expected number of accepted drafts.
"""

import numpy as np

from specsample.testing import conditional as conditional_lib
from specsample.testing.conditional import Conditional
from specsample.testing.proposal import Proposal
from specsample.types import DraftKind


def chain(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Sums prod_j min(target_j, draft_j) over the prefixes of i drafts."""
  target_probs, draft_probs, share = _of_drafted(proposal, target)
  overlap = np.cumprod(np.minimum(target_probs, draft_probs), axis=-1)
  return overlap.sum(axis=0) * share


def block(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Sums m_i = min(m_{i-1} target_i, prod_j draft_j), m_0 = 1, over prefixes.

  m_i is the probability of drafting a prefix of i tokens and keeping at least
  all of it (Sun et al., 2403.10444).
  """
  target_probs, draft_probs, share = _of_drafted(proposal, target)
  drafted = np.cumprod(draft_probs, axis=-1)
  kept = np.empty(drafted.shape)
  last = np.ones(len(drafted))
  for i in range(drafted.shape[-1]):
    last = np.minimum(last * target_probs[:, i], drafted[:, i])
    kept[:, i] = last
  return kept.sum(axis=0) * share


def coupled(
  draft: Conditional, target: Conditional, num_draft_tokens: int
) -> np.ndarray:
  """Multiplies the probabilities that both sides choose the same token.

  With shared Gumbel noise both choose x with probability
  1 / sum_y max(target_y / target_x, draft_y / draft_x), independently at each
  position (Daliri et al., 2408.07978).
  """
  both = np.ones(1)
  at_least = np.empty(num_draft_tokens)
  for t in range(num_draft_tokens):
    both = (both[:, None] * _match(target(t, 0), draft(t, 0))).reshape(-1)
    at_least[t] = both.sum()
  return at_least


def law(at_least: np.ndarray) -> np.ndarray:
  """Returns the distribution [K + 1] of the number of kept drafts."""
  return -np.diff(at_least, prepend=1, append=0)


def _match(target, draft):
  possible = (target > 0) & (draft > 0)
  ratios = lambda probs: (
    probs[:, None, :] / np.where(possible, probs, 1)[:, :, None]
  )
  larger = np.maximum(ratios(target), ratios(draft)).sum(axis=-1)
  return np.where(possible, 1 / larger, 0)


def _of_drafted(proposal, target):
  """Returns target and draft probabilities [D, K] of tokens, and shares [K].

  A prefix of i tokens occurs in V^(K - i) of the D = V^K drafts, so each
  occurrence gets a share of 1 / V^(K - i).
  """
  drafts = proposal(0)
  tokens = drafts.tokens[0]
  num_drafts = tokens.shape[-1]
  # One more than there are drafts: with K = 0 there is nothing to stack.
  rows = conditional_lib.along(target, 0, drafts.tokens, num_drafts + 1)[
    0, :, :-1
  ]
  is_token = tokens >= 0
  pick = lambda probs: np.where(
    is_token,
    np.take_along_axis(probs, np.maximum(tokens, 0)[..., None], -1)[..., 0],
    0,
  )
  if drafts.kind is DraftKind.POINT_MASS:
    return pick(rows), is_token * 1.0, np.ones(num_drafts)
  longer = np.arange(num_drafts)[::-1]
  return pick(rows), pick(drafts.probs[0]), 1.0 / rows.shape[-1] ** longer
