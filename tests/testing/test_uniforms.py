"""The law of comparisons of uniform numbers, to the last bit."""

import numpy as np
import pytest

from specsample.testing import uniforms


def test_two_comparisons():
  def outcome(case, u):
    # Case 0 accepts a quarter; case 1 accepts everything.
    accepted = u[:, 0] < np.where(case == 0, 0.25, 1)
    return np.where(accepted, 0, 1 + np.searchsorted([0.1, 0.4], u[:, 1]))

  found = uniforms.law(outcome, 2, 2, 4)
  rest = 0.75 * np.asarray([0.1, 0.3, 0.6])
  np.testing.assert_allclose(found[0], [0.25, *rest], atol=1e-6)
  np.testing.assert_array_equal(found[1], [1, 0, 0, 0])


def test_an_outcome_of_a_single_value_is_found():
  outcome = lambda case, u: (u[:, 0] == 0).astype(int)
  found = uniforms.law(outcome, 1, 1, 2)
  np.testing.assert_array_equal(found, [[1 - 2**-24, 2**-24]])


def test_a_part_inside_another_outcome_is_found():
  # Both ends and the middle are outside.
  outcome = lambda case, u: ((u[:, 0] > 0.6) & (u[:, 0] < 0.8)).astype(int)
  found = uniforms.law(outcome, 1, 2, 2)
  np.testing.assert_allclose(found, [[0.8, 0.2]], atol=1e-6)


def test_a_sum_of_uniforms_is_refused():
  outcome = lambda case, u: (u[:, 0] + u[:, 1] < 1).astype(int)
  with pytest.raises(ValueError, match=r'more than 4096 boxes .* sample it'):
    uniforms.law(outcome, 1, 2, 2)
