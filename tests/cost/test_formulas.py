"""The cost model against the numbers that its papers print."""

import math

import pytest

from specsample import cost

# Chen et al., 2302.01318, table 1: ms per token of the target alone and of
# speculative sampling, with 4 draft tokens at 1.8 ms each.
_CHEN_TARGET, _CHEN_DRAFT, _CHEN_K = 14.1, 1.8, 4
_CHEN = {'XSum nucleus': 7.52, 'XSum greedy': 7.00, 'HumanEval': 5.73}
_CHEN_PRINTED = {'XSum nucleus': 1.92, 'XSum greedy': 2.01, 'HumanEval': 2.46}
_CHEN_TOKENS = {'XSum nucleus': 2.83, 'XSum greedy': 3.04, 'HumanEval': 3.72}

# Leviathan et al., 2211.17192: alpha, gamma, c and the expected improvement, to
# the digits that the paper prints.
_LEVIATHAN = [
  (0.75, 7, 0.02, 3.2),
  (0.80, 7, 0.04, 3.3),
  (0.82, 7, 0.11, 2.5),
  (0.62, 7, 0.02, 2.3),
  (0.68, 5, 0.04, 2.4),
  (0.71, 3, 0.11, 2.0),
  (0.65, 5, 0.02, 2.4),
  (0.73, 5, 0.04, 2.6),
  (0.74, 3, 0.11, 2.0),
  (0.53, 5, 0.02, 1.9),
  (0.55, 3, 0.04, 1.8),
  (0.56, 3, 0.11, 1.6),
]


@pytest.mark.parametrize('benchmark', _CHEN)
def test_chens_times_imply_tokens_and_these_the_speedup(benchmark):
  loop = _CHEN_K * _CHEN_DRAFT + _CHEN_TARGET
  tokens = cost.implied_tokens(loop, _CHEN[benchmark])
  assert tokens == pytest.approx(_CHEN_TOKENS[benchmark], abs=0.005)
  acceptance = cost.implied_acceptance(tokens, _CHEN_K)
  # Rounded as an acceptance rate is reported, to two digits.
  predicted = cost.chain_round(
    cost.PassTimes((1, 5), (_CHEN_TARGET, _CHEN_TARGET)),
    tokens_per_round=cost.expected_tokens(round(acceptance, 2), _CHEN_K),
    num_draft_tokens=_CHEN_K,
    draft_seconds=_CHEN_DRAFT,
  )
  times = _CHEN_TARGET / _CHEN[benchmark]
  assert predicted.speedup == pytest.approx(times, rel=0.01)
  # For XSum nucleus this gives 1.875; the paper prints 1.92.
  assert predicted.speedup == pytest.approx(_CHEN_PRINTED[benchmark], rel=0.05)
  assert predicted.seconds_per_token == pytest.approx(
    _CHEN[benchmark], rel=0.01
  )


@pytest.mark.parametrize(('alpha', 'gamma', 'c', 'expected'), _LEVIATHAN)
def test_leviathans_expectations(alpha, gamma, c, expected):
  # All are printed with two digits, so allow half of the last digit either way.
  low, middle, high = (
    cost.leviathan_speedup(alpha + change, gamma, c - change)
    for change in (-0.005, 0, 0.005)
  )
  assert low - 0.05 <= expected <= high + 0.05
  assert middle == pytest.approx(
    (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * c + 1))
  )


@pytest.mark.parametrize(
  ('alpha', 'gamma', 'speedup'),
  [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
  ],
)
def test_leviathans_table_of_free_drafters(alpha, gamma, speedup):
  found = cost.leviathan_speedup(alpha, gamma, 0)
  assert found == pytest.approx(speedup, abs=0.005)


def test_certain_drafts_are_all_kept_and_others_none():
  assert cost.expected_tokens(1, 7) == 8
  assert cost.expected_tokens(0, 7) == 1
  assert cost.expected_tokens(0.5, 0) == 1


def test_shares_by_position_give_the_mean_accepted_length():
  # vLLM's EAGLE-3 for Llama 3.1 8B on MT-bench; vLLM prints 2.60.
  found = cost.expected_tokens_by_position((0.730, 0.521, 0.355))
  assert found == pytest.approx(2.60, abs=0.01)
  constant = [0.7**i for i in range(1, 4)]
  assert cost.expected_tokens_by_position(constant) == pytest.approx(
    cost.expected_tokens(0.7, 3)
  )


@pytest.mark.parametrize('acceptance', [0.0, 0.3, 0.85, 1.0])
def test_an_implied_acceptance_is_the_one_that_gave_the_tokens(acceptance):
  tokens = cost.expected_tokens(acceptance, 5)
  assert cost.implied_acceptance(tokens, 5) == pytest.approx(
    acceptance, abs=1e-12
  )


def test_drafting_pays_where_acceptance_exceeds_the_cost():
  assert cost.best_num_draft_tokens(0.3, 0.4) == 0
  assert cost.best_num_draft_tokens(0.41, 0.4) == 1
  best = cost.best_num_draft_tokens(0.8, 0.05)
  at = lambda k: cost.leviathan_speedup(0.8, k, 0.05)
  assert at(best - 1) < at(best) > at(best + 1)
  assert cost.best_num_draft_tokens(1, 0.05, most=9) == 9


def test_memory_bound_speedup_counts_parameters():
  # 115M parameters for 7B, 3 drafts, 2.4 tokens: 2.4 / (3 * 115 / 7000 + 1)
  found = cost.memory_bound_speedup(2.4, 3, 115e6 / 7e9)
  assert found == pytest.approx(2.4 * 7000 / 7345)


def test_a_batch_pays_for_the_tokens_of_its_pass():
  target = cost.PassTimes((1, 4, 12, 20), (1.0, 1.0, 1.5, 3.0))
  predicted = cost.chain_round(
    target,
    tokens_per_round=2.0,
    num_draft_tokens=3,
    draft_seconds=0.1,
    overhead_seconds=0.05,
    batch=4,
  )
  # 16 tokens are halfway from 12 to 20.
  assert predicted.verify_seconds == 2.25
  assert predicted.seconds == pytest.approx(0.3 + 2.25 + 0.05)
  assert predicted.speedup == pytest.approx(2 * 1.0 / 2.6)


# A pass over one token takes 10, over one token and four drafts 14.
_PASSES = cost.PassTimes((1, 2, 5, 10), (10.0, 10.5, 14.0, 18.0))


def test_a_draft_is_read_by_the_first_width_that_holds_it():
  assert [cost.width_of(i, (0, 1, 4)) for i in range(5)] == [0, 1, 4, 4, 4]


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: cost.width_of(5, (0, 4)), r'\(0, 4\), but a round drafts up to 5'),
    (lambda: cost.expected_tokens(1.1, 4), 'acceptance is 1.1'),
    (lambda: cost.expected_tokens(math.nan, 4), 'acceptance is nan'),
    (lambda: cost.expected_tokens(0.5, -1), 'num_draft_tokens is -1'),
    (lambda: cost.expected_tokens(0.5, 1.5), 'num_draft_tokens is 1.5'),
    (lambda: cost.expected_tokens_by_position([0.5, 2]), 'a share is 2'),
    (lambda: cost.implied_acceptance(5.5, 4), '1 to 5'),
    (lambda: cost.implied_acceptance(1, 0), 'num_draft_tokens is 0'),
    (lambda: cost.leviathan_speedup(0.5, 4, -0.1), 'cost is -0.1'),
    (lambda: cost.PassTimes((2, 1), (1.0, 1.0)), 'increasing'),
    (lambda: cost.PassTimes((1, 2), (1.0,)), 'a time for each'),
    (
      lambda: cost.PassTimes((1, 5), (1.0, 2.0))(6),
      '1 to 5 tokens were measured',
    ),
  ],
)
def test_what_is_out_of_range_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
