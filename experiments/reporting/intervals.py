"""95% intervals of measurements over a few units, such as prompts.

They are delete-one jackknife intervals with Student's t (Tukey, 1958; Efron and
Tibshirani, An Introduction to the Bootstrap, chapter 11), because tables here
have 3 to 80 prompts. Percentiles of a bootstrap are just the smallest and the
largest value if there are 3 units, and cover the true value 8 times in 10 if
there are 4.
"""

from collections.abc import Callable, Mapping
import math

import numpy as np
import scipy.stats

# With two, Student's t is 12.7 standard errors, which says next to nothing.
_FEWEST = 3
# Maps sums by name, each [...], to a value of that shape.
Ratio = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def of_shares(values: np.ndarray) -> list[float] | None:
  """Returns the interval of the mean of values [n] from 0 to 1; see `interval`.

  If all values are 0 or 1, it is Clopper and Pearson's (1934) interval for a
  share, which covers the true share at least 95 times in 100. A jackknife
  interval would be too short for few such values, and empty for equal ones.
  None if there are fewer than three values, or if all are equal and between 0
  and 1.
  """
  values = np.asarray(values, float)
  if np.isin(values, (0, 1)).all() and len(values) >= _FEWEST:
    count = int(values.sum())
    found = scipy.stats.binomtest(count, len(values)).proportion_ci(0.95)
    return [float(found.low), float(found.high)]
  if np.ptp(values) == 0:
    return None
  mean = lambda sums: sums['value'] / sums['one']
  return interval(
    mean, {'value': values, 'one': np.ones(len(values))}, most=1.0
  )


def interval(
  ratio: Ratio,
  terms: Mapping[str, np.ndarray],
  *,
  least: float = 0.0,
  most: float = math.inf,
) -> list[float] | None:
  """Returns the interval of ratio(the terms' sums), over units like these.

  The ratio is smooth in the sums, as a ratio of two sums is, and from `least`
  to `most`. The terms of the units, [n], are by name. The interval is None if
  there are fewer than three units, which say next to nothing about others, or
  if the ratio has no value without one of them.
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
