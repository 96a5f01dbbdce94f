"""The metrics, on an output that was counted by hand."""

import dataclasses
import math

import numpy as np
import pytest

from specsample import stats

# K = 2. Five rounds drafted two tokens and one drafted one; of the former two
# kept both, two kept one and one kept none; the latter kept its one.
_STATS = stats.Stats(
  tokens=13, rounds=6, proposed=(0, 1, 5), accepted=(1, 3, 2)
)


def test_acceptance_is_of_what_was_drafted():
  # Of six first drafts five were kept, of five second drafts two.
  assert _STATS.acceptance_by_position == pytest.approx((5 / 6, 2 / 5))
  assert _STATS.tokens_per_round == pytest.approx(13 / 6)


def test_what_was_never_drafted_has_no_acceptance():
  never = dataclasses.replace(_STATS, proposed=(5, 1, 0), accepted=(5, 1, 0))
  first, second = never.acceptance_by_position
  assert first == 1
  assert math.isnan(second)
  assert math.isnan(stats.Stats(0, 0, (0,), (0,)).tokens_per_round)


def test_sums_are_those_of_the_counts():
  total = _STATS + _STATS
  assert total == stats.Stats(26, 12, (0, 2, 10), (2, 6, 4))


def test_rows_of_an_output_are_added():
  class Output:
    lengths = np.asarray([3, 1])
    rounds = np.asarray([2, 1])
    proposed = np.asarray([[0, 2], [1, 0]])
    accepted = np.asarray([[1, 1], [1, 0]])

  assert stats.of(Output()) == stats.Stats(4, 3, (1, 2), (2, 1))
