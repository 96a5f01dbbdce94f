"""How many nodes of a draft a batch verifies, worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.policies import decision
from specsample.types import Draft, DraftKind, Signals

_LADDER = (0, 1, 2, 4)
_BUDGET = policies.Budget(ladder=_LADDER, costs=(1.0, 1.1, 1.15, 1.6))
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


def test_a_batch_takes_the_rung_that_promises_most():
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


def test_the_likeliest_nodes_are_kept_and_never_without_their_parents():
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


def test_promises_that_are_not_kept_narrow_the_pass_and_then_end_drafting():
  policy = dataclasses.replace(_BUDGET, drafting=0.2, patience=8)
  numbers = _play(policy, (0.9, 0.81, 0.73, 0.66), 0, 60)
  assert numbers[0] == 4
  # Narrower and narrower, then only tries with longer and longer waits.
  drafted = [x for x in numbers if x]
  assert drafted == sorted(drafted, reverse=True)
  assert sum(numbers[20:]) <= 4 and numbers[20:].count(0) > 35


def test_a_try_by_which_the_batch_loses_is_in_vain_whatever_one_row_kept():
  policy = policies.Budget(ladder=(0, 4), costs=(1.0, 1.8), strength=0.1)
  draft, over = _draft(_TWO_ROWS), jnp.zeros(2, bool)
  # 2 + 1 tokens at the cost of 3.6, and 2 + 2 of them.
  for kept, patience in (((1, 0), 16), ((1, 1), 8)):
    states = decision.note((policy,), _states(policy, 2), draft)
    asked = jnp.full(2, 4)
    (state,) = decision.update((policy,), states, asked, jnp.array(kept), over)
    assert state.wait.patience.tolist() == [patience] * 2


def test_what_loses_a_little_for_long_is_given_up():
  # One of four nodes is kept in each round: 2 tokens at the cost of 2.03.
  policy = policies.Budget(ladder=(0, 4), costs=(1.0, 2.03), strength=2.0)
  draft, over = _draft(_TWO_ROWS[:1]), jnp.zeros(1, bool)

  def after(rounds):
    states = _states(policy, 1)
    for _ in range(rounds):
      states = decision.note((policy,), states, draft)
      states = decision.update(
        (policy,), states, jnp.array([4]), jnp.array([1]), over
      )
    (state,) = states
    return state.wait.rounds.tolist()

  assert after(20) == [0]
  assert after(150) != [0]


def test_more_rows_notice_sooner_that_drafts_lose():
  # Every row gets 2 tokens at the cost of 2.2 in each round.
  policy = policies.Budget(ladder=(0, 4), costs=(1.0, 2.2), strength=2.0)

  def rounds_until_plain(rows):
    draft = _draft(_TWO_ROWS[:1] * rows)
    over, kept = jnp.zeros(rows, bool), jnp.ones(rows, jnp.int32)
    states, rounds = _states(policy, rows), 0
    while jnp.all(decision.wanted((policy,), states, over, 4)):
      states = decision.note((policy,), states, draft)
      states = decision.update((policy,), states, 4 * kept, kept, over)
      rounds += 1
    return rounds

  assert rounds_until_plain(8) == 2  # 1.6 tokens lost in each
  assert rounds_until_plain(1) > 8


def test_drafts_that_are_kept_are_verified_for_good():
  policy = dataclasses.replace(_BUDGET, drafting=0.2)
  assert _play(policy, (0.9, 0.81, 0.73, 0.66), 4, 30) == [4] * 30


def test_timid_promises_are_corrected_upwards():
  policy = policies.Budget(ladder=(0, 1, 4), costs=(1.0, 1.1, 2.0))
  numbers = _play(policy, (0.3, 0.25, 0.2, 0.15), 4, 40)
  assert numbers[0] < 4 and numbers[-1] == 4


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'ladder': (1, 4)}, r'ladder is \(1, 4\): .* begin with 0'),
    ({'ladder': (0,)}, 'ladder is'),
    ({'ladder': (0, 4, 2)}, 'ladder is'),
    ({'costs': (1.0, 2.0)}, 'one above 0 for each of the 4'),
    ({'costs': (1.0, 2.0, 3.0, 0.0)}, 'costs are'),
    ({'drafting': -1}, 'drafting is -1'),
    ({'strength': 0}, 'strength is 0'),
    ({'patience': 0}, 'patience is 0'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_BUDGET, **settings)


def test_drafts_that_do_not_fit_are_refused():
  draft = _draft([(0.5, 0.2, 0.1)])
  with pytest.raises(ValueError, match=r'ladder ends with 4, but .* 3 nodes'):
    _kept(_BUDGET, draft)
  drawn = dataclasses.replace(_draft(_TWO_ROWS), kind=DraftKind.SAMPLED)
  with pytest.raises(ValueError, match='keeping likely ones is biased'):
    _kept(_BUDGET, drawn)


@pytest.mark.parametrize('batch', [1, 3])
def test_greedy_tokens_are_those_of_plain_decoding(batch):
  target = testing.tiny_llama(vocab_size=37)
  chain = drafters.Chain(
    model=testing.tiny_llama(vocab_size=37, num_layers=1), num_draft_tokens=3
  )
  binary = drafters.Tree(drafter=chain, topology=tree.k_ary((2, 2, 1)))
  budget = policies.Budget(ladder=(0, 3, 10), costs=(1.0, 1.2, 1.5))
  drafter = drafters.Adaptive(drafter=binary, policies=(budget,))
  assert drafter.widths == (0, 3, 10)
  params = {
    'target': target.init(jax.random.key(0)),
    'drafter': chain.model.init(jax.random.key(1)),
  }
  prompts, lengths = specsample.pad_prompts([[1, 2, 3], [4, 5], [6]][:batch])
  found = [
    specsample.generate(
      params,
      prompts,
      lengths,
      jax.random.key(0),
      model=target,
      drafter=one,
      verify=verify.tree,
      sampling=specsample.Sampling(temperature=0.0),
      max_new_tokens=12,
    )
    for one in (drafters.NoDraft(), drafter)
  ]
  np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
