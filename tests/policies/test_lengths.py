"""Draft lengths that follow from what has been accepted so far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import policies
from specsample.policies import decision


def _after(policy, rounds, num_draft_tokens=3):
  """Returns the state after rounds of (drafted, kept)."""
  state = policy.init(num_draft_tokens)
  for drafted, kept in rounds:
    state = jax.jit(policy.update)(
      np.int32(drafted), np.int32(kept), state, False
    )
  return state


def test_adaedl_asks_for_more_certainty_where_too_little_is_kept():
  policy = policies.AdaEDL(
    threshold=0.4,
    target_rate=0.8,
    step=0.1,
    rate_decay=0.5,
    threshold_decay=0.9,
  )
  # Shares .25 and .75 make rates .525 and .6375, both below the target.
  state = _after(policy, [(4, 1), (4, 3)])
  np.testing.assert_allclose(state.rate, 0.6375, rtol=1e-6)
  np.testing.assert_allclose(state.threshold, 0.42, rtol=1e-6)
  high = _after(policy, [(4, 4)])
  np.testing.assert_allclose(high.threshold, 0.39, rtol=1e-6)
  # Otherwise a threshold above all bounds would stay there.
  idle = _after(policy, [(0, 0)])
  np.testing.assert_allclose(idle.threshold, 0.39, rtol=1e-6)
  assert idle.rate == policy.init(3).rate


def test_fastest_counts_what_was_decided():
  policy = policies.Fastest(
    costs=(1, 1, 1, 1), prior=0.5, strength=2.0, decay=0.5
  )
  # One of three drafts was kept, so the third was not decided on. Then a filter
  # cut all drafts after the first, which counts as not kept.
  state = _after(policy, [(3, 1), (1, 1)])
  np.testing.assert_allclose(state.reached, [1.5, 1.5, 0.0])
  np.testing.assert_allclose(state.kept, [1.5, 0.0, 0.0])
  of_all = (1.5 + 1.0) / (3.0 + 2.0)
  np.testing.assert_allclose(
    policy.acceptance(state),
    [(1.5 + 2 * of_all) / 3.5, 2 * of_all / 3.5, of_all],
    rtol=1e-6,
  )


def test_fastest_gives_up_drafts_that_a_filter_cuts():
  policy = policies.Fastest(costs=(1, 1.2, 1.4, 1.6))
  state = _after(policy, 40 * [(0, 0)])
  assert int(policy.length(state)) == 0


@pytest.mark.parametrize(
  ('costs', 'rate', 'length'),
  [
    # E[tokens] for a rate of .8: 1, 1.8, 2.44, 2.952.
    ((1, 1, 1, 1), 0.8, 3),
    ((1, 1.2, 1.4, 1.9), 0.8, 2),
    ((1, 1.2, 1.8, 2.7), 0.8, 1),
  ],
)
def test_fastest_maximises_tokens_a_cost(costs, rate, length):
  policy = policies.Fastest(costs=costs, prior=rate)
  assert int(policy.length(policy.init(3))) == length
  expected = np.cumsum([1, rate, rate**2, rate**3]) / costs
  np.testing.assert_allclose(
    policy.tokens_a_cost(policy.init(3)), expected, rtol=1e-6
  )


def test_fastest_decodes_plainly_where_drafts_lose_and_tries_again_ever_later():
  policy = policies.Fastest(
    costs=(1, 1.5, 2, 3), patience=4, most_patience=16, strength=1.0
  )
  state = policy.init(3)
  lengths = []
  for _ in range(120):
    lengths.append(int(policy.length(state)))
    state = policy.update(np.int32(lengths[-1]), np.int32(0), state)
  tries = np.flatnonzero(lengths)
  waits = np.diff(tries[tries > tries[0] + 4])
  # The wait grows to its maximum and no further.
  assert waits[-1] == waits[-2] == 17
  assert np.all(np.diff(waits) >= 0) and waits[0] < 17
  assert max(lengths[i] for i in tries[-3:]) == 1


def test_fastest_comes_back_when_drafts_are_good_again():
  policy = policies.Fastest(costs=(1, 1.2, 1.4, 1.6), patience=4)
  state = policy.init(3)
  for _ in range(60):
    drafted = policy.length(state)
    state = policy.update(drafted, np.int32(0), state)
  lengths = []
  for _ in range(400):
    lengths.append(int(policy.length(state)))
    state = policy.update(np.int32(lengths[-1]), np.int32(lengths[-1]), state)
  assert lengths[0] == 0
  assert np.all(np.asarray(lengths[-50:]) == 3)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'costs': (1,)}, 'costs are'),
    ({'costs': (1, 0)}, 'each above 0'),
    ({'costs': (1, float('nan'))}, 'each above 0'),
    ({'costs': (1, 2), 'prior': 1.2}, 'prior is 1.2'),
    ({'costs': (1, 2), 'strength': 0}, 'strength is 0'),
    ({'costs': (1, 2), 'patience': 0}, 'patience is 0'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    policies.Fastest(**settings)


def test_a_cost_that_is_missing_is_named():
  with pytest.raises(ValueError, match=r'costs has 2 numbers, .* give 5'):
    policies.Fastest(costs=(1, 2)).init(4)


def _together(policy, kept, rounds, over=(False, False)):
  """Returns what two rows ask for in each round, if they keep `kept` drafts."""
  states = (jax.tree.map(lambda x: jnp.stack([x] * 2), policy.init(2)),)
  over = jnp.asarray(over)
  asked = []
  for _ in range(rounds):
    wanted = decision.wanted((policy,), states, over, 2)
    asked.append(wanted.tolist())
    took = jnp.minimum(jnp.asarray(kept), wanted)
    states = decision.update((policy,), states, wanted, took, over)
  return np.asarray(asked)


def test_a_whole_batch_drafts_where_the_tokens_of_all_rows_pay():
  # One row keeps all drafts and the other none: 4 tokens pay for 1.4, not 2.2.
  of_costs = lambda last, whole_batch: policies.Fastest(
    costs=(1, last, last), patience=8, strength=1.0, whole_batch=whole_batch
  )
  alone = _together(of_costs(2.2, False), (2, 0), 24)
  assert np.all(alone[:, 0] == 2) and alone[:, 1].sum() < 10
  cheap = _together(of_costs(1.4, True), (2, 0), 24)
  assert np.all(cheap == 2)
  dear = _together(of_costs(2.2, True), (2, 0), 24)
  np.testing.assert_array_equal(dear[:, 0], dear[:, 1])
  assert np.all(dear[8:16] == 0) or dear[4:].sum() < 12
  # Now the row that keeps all drafts is the whole batch.
  left = _together(of_costs(2.2, True), (2, 0), 24, over=(False, True))
  assert np.all(left[:, 0] == 2)


def test_a_whole_batch_tries_again_in_one_round():
  policy = policies.Fastest(costs=(1, 9, 9), patience=4, whole_batch=True)
  asked = _together(policy, (0, 0), 40)
  np.testing.assert_array_equal(asked[:, 0], asked[:, 1])
  # It tries again after 4 rounds, then after 8 and 16.
  assert np.flatnonzero(asked[:, 0]).tolist() == [0, 5, 14, 31]
