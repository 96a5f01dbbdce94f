"""The acceptance histogram, and every metric that follows from it.

Counts are of emitted tokens: what a round drafted behind a stop token is in
`proposed`, but was neither accepted nor emitted.
"""

import dataclasses

import numpy as np

from specsample.types import ArrayLike, Output


@dataclasses.dataclass(frozen=True)
class Stats:
  """Counts over any number of sequences; `+` joins them."""

  tokens: int  # emitted
  rounds: int  # passes of the target, the prefill left out
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
    """Emitted tokens a pass of the target (tau, mean accepted length)."""
    return self.tokens / self.rounds if self.rounds else float('nan')

  @property
  def acceptance_by_position(self) -> tuple[float, ...]:
    """[K]: of the rounds that drafted token i, the share that emitted it."""
    proposed, accepted = _at_least(self.proposed), _at_least(self.accepted)
    return tuple(
      float(a / p) if p else float('nan')
      for a, p in zip(accepted[1:], proposed[1:], strict=True)
    )

  @property
  def kept(self) -> int:
    """Drafts that were emitted."""
    return int(_at_least(self.accepted)[1:].sum())

  @property
  def judged(self) -> int:
    """Drafts whose turn came: all before them in their round were kept.

    Where rounds draft different numbers of tokens, the two histograms may leave
    open whether a round kept all of a short draft or lost a longer one. Such
    rounds count as the latter.
    """
    proposed, accepted = _at_least(self.proposed), _at_least(self.accepted)
    return int(np.minimum(proposed[1:], accepted[:-1]).sum())

  @property
  def acceptance(self) -> float:
    """`kept` over `judged`, NaN where nothing was drafted.

    The most likely value of alpha (Leviathan et al., 2211.17192, definition
    3.1), if it is the same at each position.
    """
    return self.kept / self.judged if self.judged else float('nan')


def _at_least(counts: tuple[int, ...]) -> np.ndarray:
  """[K + 1]: the rounds of i or more, from those of exactly i."""
  return np.cumsum(counts[::-1])[::-1]


def of(output: Output) -> Stats:
  """The statistics of all rows of an output, on the host."""
  total = lambda x: tuple(int(n) for n in np.asarray(x).sum(axis=0))
  return Stats(
    tokens=int(np.asarray(output.lengths).sum()),
    rounds=int(np.asarray(output.rounds).sum()),
    proposed=total(output.proposed),
    accepted=total(output.accepted),
  )


def optimal_acceptance(
  target_probs: ArrayLike, draft_probs: ArrayLike, num_drafts: int
) -> float:
  """The most that any exact rule keeps one of k independent drafts.

  The least, over sets H of tokens, of target(H) + 1 - draft(H)^k; the least set
  is a prefix of the tokens in the order of target / draft (Hu et al.,
  2502.18779, theorem 5; Khisti et al., 2410.18234).

  Args:
    target_probs: [V], of sum 1.
    draft_probs: [V], which the drafts are drawn from.
    num_drafts: k, at least 1.

  Returns:
    A probability.
  """
  target = np.asarray(target_probs, np.float64)
  draft = np.asarray(draft_probs, np.float64)
  if target.shape != draft.shape or target.ndim != 1 or num_drafts < 1:
    raise ValueError(
      f'target_probs are {target.shape}, draft_probs {draft.shape} and '
      f'num_drafts {num_drafts}: give two of [V], and at least 1 draft'
    )
  # What is never drafted is in no least set.
  is_drafted = draft > 0
  ratios = target[is_drafted] / draft[is_drafted]
  order = np.argsort(ratios, kind='stable')
  of_target = np.cumsum(target[is_drafted][order])
  of_draft = np.cumsum(draft[is_drafted][order])
  bounds = of_target + 1 - np.minimum(of_draft, 1) ** num_drafts
  return float(min(1.0, bounds.min()))
