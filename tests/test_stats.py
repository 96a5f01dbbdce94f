"""The metrics, on an output that was counted by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from specsample import stats
from specsample.types import DraftKind

# K = 2. Five rounds drafted two tokens: two of them kept both, two kept one and
# one kept none. One round drafted one token and kept it.
_STATS = stats.Stats(
  tokens=13, rounds=6, proposed=(0, 1, 5), accepted=(1, 3, 2)
)


def test_acceptance_is_of_what_was_drafted():
  # Five of six first drafts were kept, and two of five second drafts.
  assert _STATS.acceptance_by_position == pytest.approx((5 / 6, 2 / 5))
  assert _STATS.tokens_per_round == pytest.approx(13 / 6)


def test_alpha_is_of_the_drafts_whose_turn_came():
  # All six first drafts, and a second after each of the five that were kept;
  # the counts can't tell that one of these rounds drafted no second token.
  assert (_STATS.kept, _STATS.judged) == (7, 11)
  assert _STATS.acceptance == pytest.approx(7 / 11)


def test_plain_rounds_are_the_share_that_drafted_nothing():
  assert _STATS.plain_rounds == 0
  some = dataclasses.replace(_STATS, proposed=(3, 1, 2), accepted=(4, 1, 1))
  assert some.plain_rounds == 0.5
  assert (some + _STATS).plain_rounds == 0.25
  assert math.isnan(stats.Stats(0, 0, (0,), (0,)).plain_rounds)


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

  assert stats.summarize(Output()) == stats.Stats(4, 3, (1, 2), (2, 1))


def _independent(draft, tokens):
  return np.prod(draft[list(tokens)])


def _without_replacement(draft, tokens):
  """Returns the probability of drawing these tokens, in this order."""
  drawn = 1.0
  for i, token in enumerate(tokens):
    taken = draft[list(tokens[:i])].sum()
    drawn *= 0 if token in tokens[:i] else draft[token] / (1 - taken)
  return drawn


_DRAWN = {
  DraftKind.SAMPLED: _independent,
  DraftKind.WITHOUT_REPLACEMENT: _without_replacement,
}


def _by_linear_program(target, draft, num_drafts, kind):
  """Returns how often an optimal coupling has the token among the drafts."""
  size = target.size
  drafts = list(itertools.product(range(size), repeat=num_drafts))
  pairs = [(y, x) for y in range(size) for x in range(len(drafts))]
  gain = [-float(y in drafts[x]) for y, x in pairs]
  of_target = [[y == i for y, _ in pairs] for i in range(size)]
  of_drafts = [[x == i for _, x in pairs] for i in range(len(drafts))]
  right = [*target, *(_DRAWN[kind](draft, x) for x in drafts)]
  solved = optimize.linprog(gain, A_eq=of_target + of_drafts, b_eq=right)
  return -solved.fun


@pytest.mark.parametrize('kind', _DRAWN)
@pytest.mark.parametrize('num_drafts', [1, 2, 3])
def test_the_bound_is_that_of_a_linear_program(num_drafts, kind):
  rng = np.random.default_rng(num_drafts)
  for _ in range(6):
    target, draft = rng.dirichlet(np.full(4, 0.7), size=2)
    target[rng.integers(4)] = 0
    target /= target.sum()
    expected = _by_linear_program(target, draft, num_drafts, kind)
    found = stats.optimal_acceptance(target, draft, num_drafts, kind)
    assert found == pytest.approx(expected, abs=1e-8)


def test_the_bound_of_the_worked_example():
  target, draft = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
  assert stats.optimal_acceptance(target, draft, 2) == pytest.approx(0.86)
  # With one draft, it is what the token rule keeps.
  assert stats.optimal_acceptance(target, draft, 1) == pytest.approx(0.7)
  without = DraftKind.WITHOUT_REPLACEMENT
  # The least set is that of 1 and 2, which are drafted in either order.
  both = 0.3 * 0.5 / 0.7 + 0.5 * 0.3 / 0.5
  assert stats.optimal_acceptance(target, draft, 2, without) == pytest.approx(
    0.5 + 1 - both
  )
  # All tokens are drafted.
  every = stats.optimal_acceptance(target, draft, 3, without)
  assert every == pytest.approx(1)
  one = stats.optimal_acceptance(target, (0.0, 1.0, 0.0), 2, without)
  assert one == pytest.approx(0.3)


def test_bounds_of_nothing_are_refused():
  with pytest.raises(
    ValueError, match=r'num_drafts is 0: give two arrays of shape \[V\]'
  ):
    stats.optimal_acceptance((1.0,), (1.0,), 0)
  with pytest.raises(
    ValueError, match="kind is 'point_mass', but the bound is"
  ):
    stats.optimal_acceptance((1.0,), (1.0,), 1, DraftKind.POINT_MASS)
