"""The acceptance histogram, and every metric that follows from it.

Only emitted tokens count as accepted: a token drafted after a stop token is in
`proposed`, but was neither accepted nor emitted.
"""

import dataclasses
from typing import Protocol

import numpy as np

from specsample.types import ArrayLike, DraftKind

# The kinds of siblings for which `optimal_acceptance` is known.
BOUNDED_KINDS = frozenset([DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT])


@dataclasses.dataclass(frozen=True)
class Stats:
  """Counts over any number of sequences; `+` adds them up."""

  tokens: int  # emitted
  rounds: int  # target passes, without the prefill
  proposed: tuple[int, ...]  # [K + 1], rounds that drafted i tokens
  accepted: tuple[int, ...]  # [K + 1], rounds that emitted i drafted tokens

  def __add__(self, other: 'Stats') -> 'Stats':
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    return Stats(
      self.tokens + other.tokens,
      self.rounds + other.rounds,
      add(self.proposed, other.proposed),
      add(self.accepted, other.accepted),
    )

  @property
  def tokens_per_round(self) -> float:
    """The emitted tokens per target pass (tau, mean accepted length)."""
    return self.tokens / self.rounds if self.rounds else float('nan')

  @property
  def plain_rounds(self) -> float:
    """The share of rounds that drafted nothing; NaN if there was no round.

    If the drafter has a width of 0 (`Drafter`), the target read one token
    in such a round, unless another row of the batch had a draft.
    """
    return self.proposed[0] / self.rounds if self.rounds else float('nan')

  @property
  def acceptance_by_position(self) -> tuple[float, ...]:
    """The share [K] of rounds drafting token i in which it was emitted."""
    proposed, accepted = _at_least(self.proposed), _at_least(self.accepted)
    return tuple(
      float(a / p) if p else float('nan')
      for a, p in zip(accepted[1:], proposed[1:], strict=True)
    )

  @property
  def kept(self) -> int:
    """The number of draft tokens that were emitted."""
    return int(_at_least(self.accepted)[1:].sum())

  @property
  def judged(self) -> int:
    """The number of draft tokens reached: all before them were kept.

    If rounds draft different numbers of tokens, the two histograms may leave
    open whether a round kept all of a short draft or rejected a token of a
    longer one. Such a round counts as a rejection. So does a round that a stop
    token ends before the end of the draft; there is at most one per answer.
    """
    proposed, accepted = _at_least(self.proposed), _at_least(self.accepted)
    return int(np.minimum(proposed[1:], accepted[:-1]).sum())

  @property
  def acceptance(self) -> float:
    """The acceptance rate, `kept` / `judged`; NaN if nothing was drafted.

    The maximum-likelihood estimate of alpha (Leviathan et al., 2211.17192,
    definition 3.1), if it is the same at each position.
    """
    return self.kept / self.judged if self.judged else float('nan')


def _at_least(counts: tuple[int, ...]) -> np.ndarray:
  """Returns the rounds of i or more [K + 1], from those of exactly i."""
  return np.cumsum(counts[::-1])[::-1]


class Counted(Protocol):
  """An output of any number of rows, such as `Output` and `Rollouts`."""

  @property
  def lengths(self) -> ArrayLike:
    """[...] int32, emitted tokens."""

  @property
  def rounds(self) -> ArrayLike:
    """[...] int32, target passes since the prefill."""

  @property
  def proposed(self) -> ArrayLike:
    """[..., K + 1] int32, rounds that drafted i tokens."""

  @property
  def accepted(self) -> ArrayLike:
    """[..., K + 1] int32, rounds that emitted i drafted tokens."""


def summarize(output: Counted) -> Stats:
  """Returns the statistics of all rows of an output, on the host."""
  rows = lambda x: np.reshape(x, (-1, np.shape(x)[-1]))
  total = lambda x: tuple(int(n) for n in rows(x).sum(axis=0))
  return Stats(
    tokens=int(np.asarray(output.lengths).sum()),
    rounds=int(np.asarray(output.rounds).sum()),
    proposed=total(output.proposed),
    accepted=total(output.accepted),
  )


def optimal_acceptance(
  target_probs: ArrayLike,
  draft_probs: ArrayLike,
  num_drafts: int,
  kind: DraftKind = DraftKind.SAMPLED,
) -> float:
  """Returns the highest rate at which an exact rule can keep one of k siblings.

  It is the minimum, over sets H of tokens, of target(H) + 1 - Pr(all drafts are
  in H); the minimising set is a prefix of the tokens sorted by target / draft
  (Hu et al., 2502.18779, theorem 5; Khisti et al., 2410.18234). For independent
  drafts that probability is draft(H)^k. Without replacement it is a sum over
  k - 1 of the drafts, which takes V^k steps.

  Args:
    target_probs: [V], of sum 1.
    draft_probs: [V], the distribution of the drafts, or of the first of them if
      they are drawn without replacement.
    num_drafts: k, at least 1.
    kind: of the siblings, SAMPLED or WITHOUT_REPLACEMENT.

  Returns:
    A probability.

  Raises:
    ValueError: if the shapes do not fit, there is no draft, or the kind is
      another.
  """
  target = np.asarray(target_probs, np.float64)
  draft = np.asarray(draft_probs, np.float64)
  if target.shape != draft.shape or target.ndim != 1 or num_drafts < 1:
    raise ValueError(
      f'target_probs has shape {target.shape}, draft_probs has shape '
      f'{draft.shape} and num_drafts is {num_drafts}: give two arrays of shape '
      '[V], and at least 1 draft token'
    )
  if kind not in BOUNDED_KINDS:
    known = sorted(known.value for known in BOUNDED_KINDS)
    raise ValueError(
      f'kind is {kind.value!r}, but the bound is known only for {known}: give '
      'one of these kinds'
    )
  # Tokens that are never drafted are in no minimising set.
  is_drafted = draft > 0
  ratios = target[is_drafted] / draft[is_drafted]
  order = np.argsort(ratios, kind='stable')
  of_target = np.cumsum(target[is_drafted][order])
  of_draft = draft[is_drafted][order]
  if kind is DraftKind.SAMPLED:
    all_within = np.minimum(np.cumsum(of_draft), 1) ** num_drafts
  else:
    all_within = _all_within(of_draft, num_drafts)
  bounds = of_target + 1 - all_within
  return float(min(1.0, bounds.min()))


def _all_within(draft, num_drafts):
  """Returns Pr(k drafts are among the first 1, 2, ..., V tokens), [V].

  The drafts are drawn without replacement from draft [V]; if that has fewer
  tokens than k, all of them are drafted.
  """
  if num_drafts == 1 or draft.size == 1:
    return np.cumsum(draft)
  within = np.zeros(draft.size)
  for i, first in enumerate(draft):
    rest = np.delete(draft, i)
    behind = _all_within(rest / rest.sum(), num_drafts - 1)
    # A prefix that contains token i has one token less in `rest`.
    within[i:] += first * np.append(0, behind)[i:]
  return within
