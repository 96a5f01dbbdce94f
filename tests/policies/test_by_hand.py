"""Decisions of policies, worked out by hand."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import policies
from specsample.drafters import signals as signals_lib
from specsample.policies import decision
from specsample.types import Draft, DraftKind, Signals

_SIGNALS = Signals(
  log_prob=jnp.asarray(np.log([0.5, 0.1, 0.6])),
  max_log_prob=jnp.asarray(np.log([0.5, 0.7, 0.6])),
  rank=jnp.asarray([0, 2, 0]),
  entropy=jnp.asarray([0.81, 0.25, 1.21]),
  confidence=jnp.asarray([0.9, 0.5, 0.8]),
)
_CHAIN = Draft(
  tokens=jnp.asarray([4, 2, 7]),
  probs=None,
  kind=DraftKind.SAMPLED,
  signals=_SIGNALS,
)
# No threshold below is equal to a probability: e to the log of .6 may be less.
# Nodes 1 and 2 are siblings, and 3 is a child of 1.
_TREE = dataclasses.replace(
  _CHAIN, kind=DraftKind.POINT_MASS, parents=jnp.asarray([0, 0, 1])
)


@pytest.mark.parametrize(
  ('policy', 'reads_token', 'passes'),
  [
    (policies.TokenProbability(0.5), True, [1, 0, 1]),
    (policies.PathProbability(0.04), True, [1, 1, 0]),
    (policies.TopK(2), True, [1, 0, 1]),
    (policies.LargestProbability(0.59), False, [0, 1, 1]),
    (policies.Confidence(0.8), False, [1, 0, 1]),
    (policies.ConfidenceProduct(0.4), False, [1, 1, 0]),
    (policies.SVIP(1.0), False, [1, 1, 0]),
    (policies.AdaEDL(scale=1.0, threshold=0.1), False, [1, 1, 0]),
  ],
)
def test_what_passes_of_a_chain(policy, reads_token, passes):
  found = policy.passes(_CHAIN, policy.init(3))
  assert found.tolist() == [bool(x) for x in passes]
  # A filter that reads the token itself may only decide on those after it.
  assert policy.reads_token == reads_token


@pytest.mark.parametrize(
  ('policy', 'passes'),
  [
    (policies.PathProbability(0.29), [1, 0, 1]),  # .5, .1, .5 * .6
    (policies.TopNodes(1), [1, 0, 0]),
    (policies.TopNodes(2), [1, 0, 1]),
    (policies.TopNodes(3), [1, 1, 1]),
  ],
)
def test_what_passes_of_a_tree(policy, passes):
  found = policy.passes(_TREE, ())
  assert found.tolist() == [bool(x) for x in passes]


def test_of_equals_the_first_is_kept_and_of_what_is_not_there_nothing():
  equal = dataclasses.replace(
    _TREE,
    tokens=jnp.asarray([-1, 3, -1]),
    signals=dataclasses.replace(_SIGNALS, log_prob=jnp.zeros(3)),
  )
  assert policies.TopNodes(1).passes(equal, ()).tolist() == [0, 1, 0]
  there = dataclasses.replace(equal, tokens=jnp.asarray([1, 3, 5]))
  assert policies.TopNodes(2).passes(there, ()).tolist() == [1, 1, 0]


def test_signals_are_those_of_the_softmax():
  logits = np.asarray([[0.0, 1.0, 2.0, -np.inf], [5.0, 5.0, 5.0, 5.0]])
  probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  found = signals_lib.of_tokens(jnp.asarray(logits), jnp.asarray([1, 2]), None)
  np.testing.assert_allclose(np.exp(found.log_prob), [probs[0, 1], 0.25])
  np.testing.assert_allclose(np.exp(found.max_log_prob), [probs[0, 2], 0.25])
  assert found.rank.tolist() == [1, 0]
  own = probs[0, :3]
  entropy = [-(own * np.log(own)).sum(), np.log(4)]
  np.testing.assert_allclose(found.entropy, entropy, rtol=1e-6)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_whole_batch_drafts_where_the_tokens_of_all_rows_pay():
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


def test_whole_batch_tries_again_in_one_round():
  policy = policies.Fastest(costs=(1, 9, 9), patience=4, whole_batch=True)
  asked = _together(policy, (0, 0), 40)
  np.testing.assert_array_equal(asked[:, 0], asked[:, 1])
  # It tries again after 4 rounds, then after 8 and 16.
  assert np.flatnonzero(asked[:, 0]).tolist() == [0, 5, 14, 31]


_BUDGET = policies.Budget(ladder=(0, 1, 2, 4), costs=(1.0, 1.1, 1.15, 1.6))
# The probabilities of the paths are .9, .81, .73, .66 and .5, .2, .1, .05.
_TWO_ROWS = ((0.9, 0.81, 0.73, 0.66), (0.5, 0.2, 0.1, 0.05))


def _draft(paths, parents=None):
  """Returns point masses whose paths have these probabilities, [B, N]."""
  log_paths = np.log(np.asarray(paths, np.float32))
  behind = np.pad(log_paths, ((0, 0), (1, 0)))
  number = len(paths[0])
  parents = tuple(range(number)) if parents is None else parents
  log_prob = jnp.asarray(log_paths - behind[:, list(parents)])
  return Draft(
    tokens=jnp.ones((len(paths), number), jnp.int32),
    probs=None,
    kind=DraftKind.POINT_MASS,
    parents=jnp.tile(jnp.asarray(parents), (len(paths), 1)),
    signals=Signals(
      log_prob=log_prob,
      max_log_prob=log_prob,
      rank=jnp.zeros_like(log_prob, jnp.int32),
      entropy=log_prob,
    ),
  )


def _states(policy, rows, depth=4):
  return (jax.tree.map(lambda x: jnp.stack([x] * rows), policy.init(depth)),)


def _kept(policy, draft, states=None, over=None):
  """Returns the nodes of each row that are verified, [B, N] bool."""
  rows, number = draft.tokens.shape
  wanted = jnp.full(rows, number)
  over = jnp.zeros(rows, bool) if over is None else jnp.asarray(over)
  states = _states(policy, rows) if states is None else states
  keep, _ = decision.decide((policy,), states, wanted, over, draft)
  return np.asarray(keep)


@pytest.mark.slow
def test_batch_takes_the_rung_that_promises_most():
  # 2, 3.09, 3.83 and 3.72 tokens per cost: two nodes each.
  assert _kept(_BUDGET, _draft(_TWO_ROWS)).sum(axis=1).tolist() == [2, 2]
  # Alone, the first row promises 1, 1.73, 2.36 and 2.56, the other 1, 1.36,
  # 1.48 and 1.16.
  alone = [_kept(_BUDGET, _draft([row])).sum() for row in _TWO_ROWS]
  assert alone == [4, 2]
  # A row that is done counts for nothing.
  left = _kept(_BUDGET, _draft(_TWO_ROWS), over=(False, True))
  assert left[0].sum() == 4


def test_drafting_that_is_paid_for_anyway_favours_wide_passes():
  dear = dataclasses.replace(_BUDGET, drafting=10.0)
  assert _kept(dear, _draft(_TWO_ROWS)).sum(axis=1).tolist() == [4, 4]


def test_likeliest_nodes_are_kept_and_never_without_their_parents():
  # Nodes 1 and 4 follow the pending token, 2 and 3 follow node 1.
  draft = _draft([(0.6, 0.42, 0.12, 0.3)], parents=(0, 1, 1, 0))
  for width, kept in ((1, [1, 0, 0, 0]), (2, [1, 1, 0, 0]), (3, [1, 1, 0, 1])):
    policy = policies.Budget(ladder=(0, width, 4), costs=(1, 1e-3, 9))
    assert _kept(policy, draft).tolist() == [[bool(x) for x in kept]]
  # However often deep drafts were kept, none is ahead of its parent.
  (state,) = _states(_BUDGET, 1)
  state = dataclasses.replace(
    state, promised=jnp.asarray([[90.0, 1, 1, 1]]), kept=9 * state.kept + 9
  )
  policy = policies.Budget(ladder=(0, 1, 4), costs=(1, 1e-3, 9))
  assert _kept(policy, draft, (state,)).tolist() == [
    [True, False, False, False]
  ]


def _play(policy, paths, kept, rounds):
  """Returns how many nodes a row verifies in each round; it keeps `kept`."""
  states, draft = _states(policy, 1), _draft([paths])
  over, numbers = jnp.zeros(1, bool), []
  for _ in range(rounds):
    wanted = decision.wanted((policy,), states, over, 4)
    number = jnp.int32(0)
    if wanted[0]:
      keep, _ = decision.decide((policy,), states, wanted, over, draft)
      cut = dataclasses.replace(draft, tokens=jnp.where(keep, draft.tokens, -1))
      states = decision.note((policy,), states, cut)
      number = jnp.sum(keep)
    took = jnp.minimum(kept, number)[None]
    states = decision.update((policy,), states, number[None], took, over)
    numbers.append(int(number))
  return numbers


@pytest.mark.slow
def test_promises_that_are_not_kept_narrow_the_pass_and_then_end_drafting():
  policy = dataclasses.replace(_BUDGET, drafting=0.2, patience=8)
  numbers = _play(policy, (0.9, 0.81, 0.73, 0.66), 0, 60)
  assert numbers[0] == 4
  # Narrower and narrower, then only tries with longer and longer waits.
  drafted = [x for x in numbers if x]
  assert drafted == sorted(drafted, reverse=True)
  assert sum(numbers[20:]) <= 4 and numbers[20:].count(0) > 35


def _tries(cost, strength, kept):
  """Yields the state of a policy after each round that verifies four nodes.

  Such a round costs as much as so many plain ones; rows keep `kept` drafts.
  """
  policy = policies.Budget(ladder=(0, 4), costs=(1.0, cost), strength=strength)
  draft, kept = _draft(_TWO_ROWS[:1] * len(kept)), jnp.asarray(kept)
  over, asked = jnp.zeros(kept.size, bool), jnp.full(kept.size, 4)

  @jax.jit
  def play(states):
    states = decision.note((policy,), states, draft)
    return decision.update((policy,), states, asked, kept, over)

  states = _states(policy, kept.size)
  while True:
    states = play(states)
    yield states[0]


def test_try_by_which_the_batch_loses_is_in_vain_whatever_one_row_kept():
  # 2 + 1 tokens at the cost of 3.6, and 2 + 2 of them.
  for kept, patience in (((1, 0), 16), ((1, 1), 8)):
    state = next(_tries(1.8, 0.1, kept))
    assert state.wait.patience.tolist() == [patience] * 2


def test_what_loses_a_little_for_long_is_given_up():
  # One of four nodes is kept in each round: 2 tokens at the cost of 2.03.
  states = list(itertools.islice(_tries(2.03, 2.0, [1]), 150))
  assert states[19].wait.rounds.tolist() == [0]
  assert states[149].wait.rounds.tolist() != [0]


def test_more_rows_notice_sooner_that_drafts_lose():
  # Every row gets 2 tokens at the cost of 2.2 in each round.
  goes_on = lambda state: not np.any(state.wait.rounds)
  rounds = lambda rows: (
    1 + len(list(itertools.takewhile(goes_on, _tries(2.2, 2.0, [1] * rows))))
  )
  assert rounds(8) == 2  # 1.6 tokens lost in each
  assert rounds(1) > 8


@pytest.mark.slow
def test_drafts_that_are_kept_are_verified_for_good():
  policy = dataclasses.replace(_BUDGET, drafting=0.2)
  assert _play(policy, (0.9, 0.81, 0.73, 0.66), 4, 30) == [4] * 30


@pytest.mark.slow
def test_timid_promises_are_corrected_upwards():
  policy = policies.Budget(ladder=(0, 1, 4), costs=(1.0, 1.1, 2.0))
  numbers = _play(policy, (0.3, 0.25, 0.2, 0.15), 4, 40)
  assert numbers[0] < 4 and numbers[-1] == 4
