"""Pearson's chi-square test, with its power stated."""

from collections.abc import Iterable
import dataclasses

import numpy as np
from scipy import optimize
from scipy import stats

# One false alarm in a million tests; an effect is detectable if the test finds
# it with this power.
ALPHA = 1e-6
POWER = 0.99

# Cells are merged until each has at least this expected count.
_SMALLEST_EXPECTED = 5.0
# Added for each count in a cell of probability 0: more than any threshold.
_IMPOSSIBLE = 1e6


@dataclasses.dataclass(frozen=True)
class ChiSquare:
  """The outcome of one test over any number of independent groups."""

  statistic: float
  threshold: float  # exceeded with probability ALPHA if the laws are equal
  dof: int
  samples: int
  # The smallest total variation between the law and the sampled distribution,
  # over the merged cells and averaged over the samples, at which the test fails
  # with probability POWER or more; 1 if nothing is claimed.
  detectable: float

  @property
  def passed(self) -> bool:
    """Whether there are counts and they agree with the law."""
    return self.samples > 0 and self.statistic <= self.threshold


def test(groups: Iterable[tuple[np.ndarray, np.ndarray]]) -> ChiSquare:
  """Tests counts [cells] against probabilities [cells], group by group.

  The statistics and degrees of freedom of the groups are added. A count in a
  cell of probability 0 fails the test by itself.
  """
  statistic, dof, samples = 0.0, 0, 0
  for counts, law in groups:
    size = counts.sum()
    possible = law > 0
    statistic += _IMPOSSIBLE * counts[~possible].sum()
    observed, expected = _join(counts[possible], size * law[possible])
    statistic += ((observed - expected) ** 2 / expected).sum()
    dof += expected.size - 1
    samples += size
  threshold = float(stats.chi2.isf(ALPHA, dof)) if dof else 0.0
  return ChiSquare(
    statistic=float(statistic),
    threshold=threshold,
    dof=dof,
    samples=int(samples),
    detectable=_detectable(threshold, dof, samples),
  )


def _join(counts, expected):
  """Merges the rarest cells until every expected count is large enough."""
  order = np.argsort(expected)
  counts, expected = counts[order], expected[order]
  rare = np.searchsorted(np.cumsum(expected), _SMALLEST_EXPECTED) + 1
  enough = np.searchsorted(expected, _SMALLEST_EXPECTED)
  # All rare cells become one; the next cell joins if its count is too small.
  head = min(max(rare, enough), counts.size) if enough else 0
  if not head:
    return counts, expected
  join = lambda x: np.concatenate([[x[:head].sum()], x[head:]])
  return join(counts), join(expected)


def _detectable(threshold, dof, samples):
  """Returns the smallest total variation that is found with probability POWER.

  The noncentrality n sum (d_i ** 2 / p_i) is at least n (sum |d_i|) ** 2 = 4 n
  TV ** 2 by Cauchy-Schwarz, whatever the direction of the deviation d.
  """
  if not dof:
    return 1.0
  power = lambda x: stats.ncx2.sf(threshold, dof, 4 * samples * x**2)
  if power(1.0) < POWER:
    return 1.0
  return float(optimize.brentq(lambda x: power(x) - POWER, 1e-9, 1.0))
