"""The acceptance histogram, and every metric that follows from it.

Counts are of emitted tokens: what a round drafted behind a stop token is in
`proposed`, but was neither accepted nor emitted.
"""

import dataclasses

import numpy as np

from specsample.types import Output


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
    proposed = np.cumsum(self.proposed[::-1])[::-1][1:]
    accepted = np.cumsum(self.accepted[::-1])[::-1][1:]
    return tuple(
      float(a / p) if p else float('nan')
      for a, p in zip(accepted, proposed, strict=True)
    )


def of(output: Output) -> Stats:
  """The statistics of all rows of an output, on the host."""
  total = lambda x: tuple(int(n) for n in np.asarray(x).sum(axis=0))
  return Stats(
    tokens=int(np.asarray(output.lengths).sum()),
    rounds=int(np.asarray(output.rounds).sum()),
    proposed=total(output.proposed),
    accepted=total(output.accepted),
  )
