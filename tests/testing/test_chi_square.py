"""The chi-square test: its arithmetic, its false alarms and its power."""

import numpy as np
import pytest
from scipy import stats

from specsample.testing import chi_square

_LAW = np.asarray([0.4, 0.3, 0.2, 0.1])


def test_equals_the_textbook():
  counts = np.asarray([390, 320, 190, 100])
  result = chi_square.test([(counts, _LAW)])
  expected = stats.chisquare(counts, 1000 * _LAW)
  assert result.statistic == pytest.approx(expected.statistic)
  assert result.dof == 3
  assert stats.chi2.sf(result.threshold, 3) == pytest.approx(chi_square.ALPHA)


def test_groups_are_added():
  counts = np.asarray([390, 320, 190, 100])
  one = chi_square.test([(counts, _LAW)])
  two = chi_square.test([(counts, _LAW)] * 2)
  assert two.statistic == pytest.approx(2 * one.statistic)
  assert (two.dof, two.samples) == (6, 2000)


def test_rare_cells_are_joined():
  law = np.asarray([0.5, 0.496, 0.001, 0.001, 0.001, 0.001])
  counts = np.asarray([500, 496, 4, 0, 0, 0])
  result = chi_square.test([(counts, law)])
  # Four cells together have too few counts, so the next cell joins them.
  assert (result.statistic, result.dof) == (0, 1)


def test_one_impossible_count_fails():
  law = np.asarray([0.5, 0.5, 0.0])
  assert chi_square.test([(np.asarray([500, 500, 0]), law)]).passed
  assert not chi_square.test([(np.asarray([500, 499, 1]), law)]).passed
  certain = np.asarray([0.0, 1.0])
  assert chi_square.test([(np.asarray([0, 9]), certain)]).passed
  assert not chi_square.test([(np.asarray([1, 8]), certain)]).passed


def test_nothing_agrees_with_no_law():
  assert not chi_square.test([]).passed


@pytest.mark.slow
@pytest.mark.parametrize('direction', [(1, -1, 0, 0), (1, 1, -1, -1)])
def test_what_is_called_detectable_is_detected(direction):
  rng = np.random.default_rng(0)
  samples, trials = 20_000, 300
  clean = rng.multinomial(samples, _LAW, size=trials)
  results = [chi_square.test([(counts, _LAW)]) for counts in clean]
  assert all(result.passed for result in results)
  detectable = results[0].detectable
  assert 0.005 < detectable < 0.05

  shift = np.asarray(direction) / np.abs(direction).sum() * 2
  off = _LAW + detectable * shift
  assert np.abs(off - _LAW).sum() / 2 == pytest.approx(detectable)
  biased = rng.multinomial(samples, off, size=trials)
  found = [not chi_square.test([(counts, _LAW)]).passed for counts in biased]
  assert np.mean(found) >= 0.97  # 0.99 less three standard errors

  # A quarter of it goes unnoticed.
  hidden = rng.multinomial(samples, _LAW + detectable / 4 * shift, size=trials)
  found = [not chi_square.test([(counts, _LAW)]).passed for counts in hidden]
  assert np.mean(found) < 0.05


def test_too_few_samples_detect_nothing():
  counts = np.asarray([3, 3, 2, 2])
  assert chi_square.test([(counts, _LAW)]).detectable > 0.9
