"""95% intervals of what few units, such as prompts, were measured of.

The delete-one jackknife with Student's t (Tukey, 1958; Efron and Tibshirani, An
Introduction to the Bootstrap, chapter 11), because tables here have 3 to 80
prompts: percentiles of a bootstrap, of 3 the least and the largest, hold the
value of 4 units 8 times in 10.
"""

from collections.abc import Callable, Mapping
import math

import numpy as np
import scipy.stats

# Of two, Student's t is 12.7 spreads: next to nothing is known.
_FEWEST = 3
# Sums by name, each [...], to a value of that shape.
Ratio = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def of_shares(values: np.ndarray) -> list[float] | None:
  """The interval of a mean, as `of`, of values [n] from 0 to 1.

  Where all are 0 or 1 it is that of Clopper and Pearson (1934) for a share,
  which holds it 95 times in 100 or more: a jackknife of few such is too short,
  and of equal ones nothing. None of fewer than three, and of equal values
  between.
  """
  values = np.asarray(values, float)
  if np.isin(values, (0, 1)).all() and len(values) >= _FEWEST:
    count = int(values.sum())
    found = scipy.stats.binomtest(count, len(values)).proportion_ci(0.95)
    return [float(found.low), float(found.high)]
  if np.ptp(values) == 0:
    return None
  mean = lambda sums: sums['value'] / sums['one']
  return of(mean, {'value': values, 'one': np.ones(len(values))}, most=1.0)


def of(
  ratio: Ratio,
  terms: Mapping[str, np.ndarray],
  *,
  least: float = 0.0,
  most: float = math.inf,
) -> list[float] | None:
  """The interval of ratio(the terms' sums), had the units been others alike.

  Args:
    ratio: smooth in its sums, as a ratio of two of them is.
    terms: by name, of each unit, [n].
    least: the ratio can be. most: the same.

  Returns:
    [low, high]; None of fewer than three units, which say next to nothing about
    others, and where the ratio has no value without one of them.
  """
  count = len(next(iter(terms.values())))
  if count < _FEWEST:
    return None
  terms = {name: np.asarray(values, float) for name, values in terms.items()}
  totals = {name: values.sum() for name, values in terms.items()}
  with np.errstate(divide='ignore', invalid='ignore'):
    value = ratio(totals)
    without = ratio({name: totals[name] - x for name, x in terms.items()})
  if not np.isfinite(value) or not np.isfinite(without).all():
    return None
  spread = np.sum(np.square(without - without.mean())) * (count - 1) / count
  half = scipy.stats.t.ppf(0.975, count - 1) * math.sqrt(spread)
  return [float(max(value - half, least)), float(min(value + half, most))]
