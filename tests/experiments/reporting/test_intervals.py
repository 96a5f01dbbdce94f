"""Intervals hold what they should as often as they say."""

import numpy as np
import pytest

from experiments.reporting import intervals


def _ratio(sums):
  return sums['above'] / sums['below']


@pytest.mark.parametrize('count', [3, 4, 12, 80])
def test_as_many_hold_the_value_as_they_say(count):
  """A ratio over unequal prompts: percentiles of 3 held it 74% of the time."""
  rng = np.random.default_rng(count)
  hits, repeats = 0, 2000
  for _ in range(repeats):
    below = rng.gamma(5.0, 20.0, count)
    above = below * rng.normal(1.5, 0.2, count)
    low, high = intervals.interval(_ratio, {'above': above, 'below': below})
    hits += low <= 1.5 <= high
  assert 0.925 < hits / repeats < 0.965


def test_of_a_mean_it_is_students():
  terms = {'above': [1.0, 2.0, 3.0, 6.0], 'below': [1.0] * 4}
  low, high = intervals.interval(_ratio, terms, least=-9.0)
  assert (low + high) / 2 == pytest.approx(3)
  # 3.182 is t of 3 degrees of freedom, the mean's error sqrt(14 / 3 / 4).
  assert (high - low) / 2 == pytest.approx(3.182 * 1.0801, rel=1e-3)


def test_it_stays_where_the_value_may_be():
  terms = {'above': [0.0, 1.0, 1.0], 'below': [1.0] * 3}
  assert intervals.interval(_ratio, terms, most=1.0) == [0, 1]
  assert intervals.interval(_ratio, terms, least=-5.0)[0] < 0


@pytest.mark.parametrize(
  ('above', 'below'),
  [([1.0], [1.0]), ([1.0, 2.0], [1.0, 1.0]), ([0, 0, 0], [0, 0, 0])],
)
def test_where_nothing_is_known_there_is_none(above, below):
  """With one or two units, or if there is no ratio."""
  assert intervals.interval(_ratio, {'above': above, 'below': below}) is None


def test_units_that_are_alike_leave_no_width():
  terms = {'above': [2.0, 4.0, 8.0], 'below': [1.0, 2.0, 4.0]}
  assert intervals.interval(_ratio, terms) == [2, 2]


@pytest.mark.parametrize(('count', 'share'), [(4, 0.1), (4, 0.5), (20, 0.05)])
def test_shares_of_few_hold_the_value(count, share):
  """With 4 units, a tenth right, the jackknife held it 36% of the time."""
  hits = np.random.default_rng(count).binomial(count, share, 2000)
  held = 0
  for right, times in zip(*np.unique(hits, return_counts=True), strict=True):
    low, high = intervals.of_shares([1.0] * right + [0.0] * (count - right))
    held += times * (low <= share <= high)
  assert held / len(hits) > 0.94


def test_values_that_are_all_alike_are_not_certain():
  assert intervals.of_shares([0.0] * 4) == pytest.approx([0, 0.6], abs=0.01)
  assert intervals.of_shares([1.0] * 4) == pytest.approx([0.4, 1], abs=0.01)
  assert intervals.of_shares([0.5] * 4) is None
  assert intervals.of_shares([1.0, 0.0]) is None


def test_of_values_between_it_is_students():
  values = np.asarray([0.1, 0.5, 0.9, 0.3])
  terms = {'above': values, 'below': np.ones(4)}
  assert intervals.of_shares(values) == intervals.interval(
    _ratio, terms, most=1.0
  )
