"""`auto` chooses by the machine's pass times and the drafters' cards."""

import dataclasses
import functools

import jax
import pytest

import specsample
from specsample import choosing
from specsample import cost
from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample.choosing import choice as choice_lib
from specsample.choosing import estimates
from specsample.choosing import round_costs
from specsample.loading import card as card_lib
from specsample.models import int8

_MODEL = testing.tiny_llama(vocab_size=32, max_length=256)
_TARGET = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(0)), None)
_SIZES = (1, 2, 3, 5, 8, 16)
# Seconds per pass by its number of tokens: if further tokens are free, on two
# cores, and if each costs as much as the first.
_FLAT = dict.fromkeys(_SIZES, 1.0)
_CORES = dict(zip(_SIZES, (1.0, 1.4, 1.45, 1.5, 1.55, 2.2), strict=True))
_STEEP = {size: float(size) for size in _SIZES}


def _passes(seconds):
  times = {str(size): [x, 2 * x] for size, x in seconds.items()}
  return round_costs.pass_times_of(times)


def test_the_least_times_count_and_never_fall():
  times = {'1': [2.0, 1.0], '3': [1.2, 5.0], '2': [1.5, 1.6]}
  passes = round_costs.pass_times_of(times)
  assert passes == cost.PassTimes((1, 2, 3), (1.0, 1.5, 1.5))


@pytest.mark.parametrize(
  ('seconds', 'expected'), [(_FLAT, 15), (_CORES, 7), (_STEEP, 0)]
)
def test_remembered_drafts_are_as_long_as_passes_allow(seconds, expected):
  assert choice_lib.remembered_length(_passes(seconds), 1) == expected
  assert choice_lib.remembered_length(_passes(seconds), 8) == expected


def test_of_many_rows_one_that_drafts_makes_the_pass_wide_for_all():
  # A row drafts in .45 of the rounds and then keeps 1.35 of 3 tokens, which is
  # 1.61 tokens per round. Of the rounds .45 are wide or, if 8 rows draft, .99.
  seconds = dict(zip(_SIZES, (1.0, 1.6, 1.7, 1.8, 3.5, 9.0), strict=True))
  assert choice_lib.remembered_length(_passes(seconds), 1) == 3
  assert choice_lib.remembered_length(_passes(seconds), 8) == 0


def test_a_speedup_is_tokens_over_what_a_round_costs():
  times = estimates.PartTimes(_passes(_CORES), [0.0, 0.1, 0.2, 0.3])
  estimate = estimates.of_chain('x', [0.5, 0.3, 0.01], times)
  # 1.5 / 1.55, 1.8 / 1.7, and 1.81 / 1.825 with 4 tokens, between 3 and 5.
  assert estimate.depth == 2
  assert estimate.speedup == pytest.approx(1.8 / 1.7)
  assert estimate.costs == (1.0, 1.55, 1.7)
  assert estimate.topology is None


@pytest.mark.parametrize(
  ('seconds', 'num_nodes', 'tokens', 'cost_of_round'),
  # A node with 3 children keeps .5 + .3 + .1 of them, so two full levels keep
  # .9 + .81. If every token costs as much as the first, one node is best.
  [(_FLAT, 12, 2.71, 1.25), (_STEEP, 1, 1.5, 2.15)],
)
def test_a_tree_has_as_many_nodes_as_pay(
  seconds, num_nodes, tokens, cost_of_round
):
  by_rank = [[0.5, 0.3, 0.1]] * 2
  times = estimates.PartTimes(_passes(seconds), [0.0, 0.1, 0.2])
  estimate = estimates.of_trees('x', by_rank, times, 15)
  assert estimate.topology.num_nodes == num_nodes
  assert estimate.speedup == pytest.approx(tokens / cost_of_round)
  assert estimate.depth == estimate.topology.depth
  # A tree is drafted and verified as a whole, however deep it is allowed to be.
  assert estimate.costs == (1.0, *[cost_of_round] * estimate.depth)


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('SPECSAMPLE_CACHE', str(tmp_path / 'times'))
  return tmp_path / 'times'


@pytest.fixture
def shelf(tmp_path, monkeypatch):
  """The folder that shipped drafters are looked up in, empty at first."""
  monkeypatch.setattr(card_lib, '_SHELVES', (tmp_path / 'shelf',))
  return tmp_path / 'shelf'


@pytest.fixture
def passes_take(monkeypatch):
  """A function that sets how long the machine's passes take."""

  def take(seconds):
    of_size = lambda *_, **__: {n: [x, 1.1 * x] for n, x in seconds.items()}
    monkeypatch.setattr(round_costs.pass_times, 'passes', of_size)

  return take


@pytest.fixture
def rounds_take(monkeypatch):
  """A function that sets how long rounds of so many nodes take."""

  def take(seconds):
    monkeypatch.setattr(
      *(round_costs.tree_rounds, 'seconds'),
      lambda *_, **__: {name: [x, x] for name, x in seconds.items()},
    )

  return take


@pytest.fixture
def drafting_takes(monkeypatch):
  """A function that sets how long drafts of any length take."""

  def take(seconds):
    monkeypatch.setattr(
      round_costs.pass_times, 'drafting', lambda *_, **__: [seconds]
    )

  return take


def _is_greedy(choice):
  prompts, lengths = specsample.pad_prompts([[1, 2, 3, 1, 2], [5]])
  testing.assert_greedy_equal(
    choice.params(_TARGET),
    prompts,
    lengths,
    model=_MODEL,
    drafter=choice.drafter,
    verify=choice.verify,
    max_new_tokens=24,
  )


def test_where_no_card_is_it_drafts_from_the_rows_own_text(
  cache, shelf, passes_take
):
  passes_take(_CORES)
  choice = specsample.auto(_TARGET)
  # A drafting round costs .05 on top of the pass.
  costs = (1.0, 1.45, 1.5, 1.525, 1.55, 1.567, 1.583, 1.6)
  assert choice.drafter == drafters.Suffix(num_draft_tokens=7, costs=costs)
  assert choice.reason == (
    'drafts up to 7 tokens from its own text where that promises more than the '
    'wider round costs (1.60 plain passes here)'
  )
  _is_greedy(choice)


def test_where_nothing_pays_it_decodes_plainly(cache, shelf, passes_take):
  passes_take(_STEEP)
  choice = specsample.auto(_TARGET)
  assert choice.drafter == drafters.NoDraft()
  assert choice.params(_TARGET) == {'target': _TARGET.params}
  assert choice.reason == (
    'decodes plainly: a round of 3 draft tokens costs 4.05 plain passes here'
  )


def test_uneven_times_are_not_chosen_by_nor_kept(
  cache, shelf, monkeypatch, passes_take
):
  times = lambda *_, **__: {n: [0.02, 0.04, 0.05] for n in _SIZES}
  monkeypatch.setattr(round_costs.pass_times, 'passes', times)
  choice = specsample.auto(_TARGET)
  assert choice.drafter == drafters.NoDraft()
  assert choice.reason.startswith('decodes plainly: a pass took 20 to 50 ms')
  passes_take(_FLAT)
  assert specsample.auto(_TARGET).drafter.num_draft_tokens == 15


def _ship(shelf, name, shares, target=_TARGET, make=drafters.Hydra, **card):
  drafter = make(model=_MODEL, num_draft_tokens=len(shares))
  shelf.joinpath('tiny').mkdir(parents=True, exist_ok=True)
  specsample.save_drafter(
    shelf / 'tiny' / name,
    drafter,
    drafter.init_params(jax.random.key(1), target.params),
    target=target,
    card={'held_out': {'acceptance_by_position': shares}} | card,
  )


def test_a_trained_drafter_joins_where_its_card_promises_enough(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_CORES)
  drafting_takes(0.05)
  _ship(shelf, 'good', [0.8, 0.7, 0.6])
  on_questions = {'acceptance_by_position': [0.2, 0.1]}
  _ship(shelf, 'bad', [0.9, 0.9], on_questions=on_questions)
  other = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(9)), None)
  _ship(shelf, 'of another target', [0.9, 0.9, 0.9], other)
  choice = specsample.auto(_TARGET)
  # 3.1 / (t(4) + .05 + .05); a pass over 4 tokens takes 1.475.
  assert choice.reason == (
    'drafts up to 7 tokens from its own text where that promises more than the '
    'wider round costs (1.60 plain passes here), otherwise up to 3 with good, '
    'which promises 1.97x'
  )
  assert isinstance(choice.drafter, drafters.Either)
  assert choice.drafter.trained.drafter.num_draft_tokens == 3
  _is_greedy(choice)


def test_drafters_that_cannot_promise_more_are_not_timed(
  cache, shelf, passes_take, monkeypatch
):
  passes_take(_CORES)
  timed = []

  def draft_seconds(params, model, drafter, **_):
    timed.append(drafter.num_draft_tokens)
    return [0.05]

  monkeypatch.setattr(round_costs.pass_times, 'drafting', draft_seconds)
  _ship(shelf, 'good', [0.8, 0.7, 0.6])
  # At most 1.67x, if drafting took no time.
  _ship(shelf, 'another', [0.8, 0.7])
  choice = specsample.auto(_TARGET)
  assert timed == [3]
  assert 'with good, which promises 1.97x' in choice.reason


def test_a_tree_is_drafted_where_it_promises_more_than_all_else(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_FLAT)
  drafting_takes(0.05)
  by_rank = [[0.3, 0.3, 0.3]] * 2
  _ship(
    *(shelf, 'good', [0.3, 0.09]),
    on_questions={
      'acceptance_by_position': [0.3, 0.09],
      'acceptance_by_rank': by_rank,
    },
  )
  choice = specsample.auto(_TARGET)
  # 1 + .9 + .81 tokens; drafting costs .05 and the rest of the round .05.
  assert choice.reason.endswith(
    ', otherwise trees of 12 tokens, up to 2 deep, with good, which promises '
    '2.46x'
  )
  assert choice.verify is specsample.verify.tree
  assert choice.drafter.trained.drafter.topology.num_nodes == 12
  _is_greedy(choice)


def test_ranks_deeper_than_the_drafter_are_left_out(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_FLAT)
  drafting_takes(0.05)
  measured = {
    'acceptance_by_position': [0.3, 0.09],
    'acceptance_by_rank': [[0.3, 0.2]] + [[0.9, 0.1]] * 3,
  }
  _ship(shelf, 'good', [0.3, 0.09], on_questions=measured)
  choice = specsample.auto(_TARGET)
  assert choice.drafter.trained.drafter.topology.depth == 2
  _is_greedy(choice)


def test_a_card_is_read_where_it_says_what_is_kept(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_CORES)
  drafting_takes(0.05)
  # No drafts of a third position were drafted where that was held out.
  _ship(
    *(shelf, 'good', [0.8, 0.7, None]),
    on_questions={'tokens_by_nodes': {'1': 9.0}},
  )
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # 2.5 / (t(3) + .05 + .05).
  assert choice.reason == 'drafts up to 2 with good, which promises 1.61x'


_DSPARK = functools.partial(
  drafters.DSpark, feature_layers=(0, 1), num_layers=1, rank=4
)


def test_the_trees_of_a_lattice_are_as_wide_as_pays(
  cache, shelf, passes_take, drafting_takes, rounds_take
):
  passes_take(_CORES)
  drafting_takes(0.05)
  rounds_take({'plain': 1.0, '0': 1.1, '1': 1.3, '3': 1.4, '7': 1.6, '15': 2.2})
  _ship(
    *(shelf, 'good', [0.3, 0.09]),
    make=_DSPARK,
    on_questions={
      'acceptance_by_position': [0.3, 0.09],
      'tokens_by_nodes': {'1': 1.3, '7': 2.55, '15': 2.6},
    },
  )
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # 2.55 / (t(8) + .05 + .05).
  assert choice.reason == (
    'drafts trees of up to 15 tokens, as wide as pays, with good, which '
    'promises 1.55x'
  )
  assert choice.drafter.widths == (0, 1, 3, 7, 15)
  assert choice.verify is specsample.verify.tree
  _is_greedy(choice)
  together = specsample.auto(_TARGET)
  assert together.drafter.trained == choice.drafter
  _is_greedy(together)


def test_trees_whose_whole_rounds_take_too_long_make_way_for_chains(
  cache, shelf, passes_take, drafting_takes, rounds_take
):
  passes_take(_CORES)
  drafting_takes(0.05)
  rounds_take({'plain': 1.0, '0': 1.1, '1': 2.0, '3': 2.2, '7': 2.6})
  _ship(
    *(shelf, 'good', [0.8, 0.7]),
    make=_DSPARK,
    on_questions={
      'acceptance_by_position': [0.8, 0.7],
      'tokens_by_nodes': {'1': 1.8, '7': 3.2},
    },
  )
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # By its parts 3.2 / (t(8) + .1) = 1.95, by whole rounds 3.2 / 2.6 = 1.23.
  assert choice.reason == 'drafts up to 2 with good, which promises 1.61x'


def test_of_drafters_that_do_not_pay_one_that_was_timed_is_named(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_CORES)
  drafting_takes(1.0)
  _ship(shelf, 'slow', [0.8, 0.7])
  # At most 1.07x, if drafting took no time.
  _ship(shelf, 'poor', [0.3, 0.3])
  # 2.5 / (t(3) + 1 + .05).
  assert specsample.auto(_TARGET).reason.endswith(
    '; trained drafters do not pay off (the best, slow, promises 1.00x)'
  )


def test_a_trained_drafter_that_does_not_pay_is_named(
  cache, shelf, passes_take
):
  passes_take(_CORES)
  _ship(shelf, 'bad', [0.2, 0.1])
  choice = specsample.auto(_TARGET)
  assert isinstance(choice.drafter, drafters.Suffix)
  # 1.3 tokens for a pass over 3 tokens and .05 for the rest of the round.
  assert choice.reason.endswith(
    '; trained drafters do not pay off (the best, bad, promises 0.87x)'
  )


def test_of_a_named_drafter_only_the_number_of_drafts_is_chosen(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_CORES)
  drafting_takes(0.05)
  _ship(shelf, 'good', [0.8, 0.7, 0.01])
  _ship(shelf, 'better', [0.9, 0.8, 0.7])
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # 2.5 / (t(3) + .05 + .05).
  assert choice.reason == 'drafts up to 2 with good, which promises 1.61x'
  assert isinstance(choice.drafter, drafters.Adaptive)
  _is_greedy(choice)
  _ship(shelf, 'bad', [0.2, 0.1])
  choice = specsample.auto(_TARGET, drafter=shelf / 'tiny' / 'bad')
  assert isinstance(choice.drafter, drafters.NoDraft)
  # 1.3 / (t(3) + .05 + .05).
  assert choice.reason == 'decodes plainly: bad promises 0.84x here'


def test_a_named_drafter_must_be_measured_and_for_the_target(
  cache, shelf, passes_take
):
  passes_take(_CORES)
  other = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(9)), None)
  _ship(shelf, 'foreign', [0.9, 0.9, 0.9], other)
  with pytest.raises(ValueError, match='target'):
    specsample.auto(_TARGET, drafter='tiny/foreign')
  hydra = drafters.Hydra(model=_MODEL, num_draft_tokens=2)
  params = hydra.init_params(jax.random.key(1), _TARGET.params)
  specsample.save_drafter(
    shelf / 'tiny' / 'unmeasured', hydra, params, target=_TARGET, card={}
  )
  with pytest.raises(ValueError, match='unmeasured does not say how many of'):
    specsample.auto(_TARGET, drafter='tiny/unmeasured')


def test_costs_are_of_as_many_tokens_as_the_drafter_drafts(cache):
  three = specsample.LoadedDrafter(
    drafters.Ngram(num_draft_tokens=3), None, card={}
  )
  with pytest.raises(ValueError, match='is 4, but the drafter drafts 3'):
    round_costs.costs(_TARGET, 4, trained=three)


def test_another_form_of_the_matrices_is_timed_anew(
  cache, shelf, passes_take, monkeypatch
):
  passes_take(_CORES)
  timed, calls = round_costs.pass_times.passes, []
  monkeypatch.setattr(
    round_costs.pass_times,
    'passes',
    lambda *args, **kwargs: (calls.append(1), timed(*args, **kwargs))[1],
  )
  of_int8 = dataclasses.replace(_TARGET, params=int8.weights(_TARGET.params))
  for target in (_TARGET, of_int8, _TARGET, of_int8):
    specsample.auto(target)
  assert len(calls) == 2


def test_drafters_in_other_forms_are_timed_apart(
  cache, passes_take, monkeypatch
):
  passes_take(_CORES)
  seconds = iter(([0.1], [0.4]))
  monkeypatch.setattr(
    round_costs.pass_times, 'drafting', lambda *_, **__: next(seconds)
  )
  hydra = drafters.Hydra(model=_MODEL, num_draft_tokens=2)
  own = hydra.init_params(jax.random.key(1), _TARGET.params)
  of_drafter = functools.partial(
    round_costs.drafting_seconds, _TARGET, hydra, batch_size=1
  )
  assert of_drafter(own)[-1] == 0.1
  assert of_drafter(int8.weights(own))[-1] == 0.4
  assert of_drafter(own)[-1] == 0.1


def test_drafts_that_one_pass_makes_cost_the_same_at_every_length(
  cache, drafting_takes
):
  drafting_takes(0.8)
  of = lambda drafter: round_costs.drafting_seconds(_TARGET, drafter, {}, 1)
  make = {'model': _MODEL, 'num_draft_tokens': 2}
  features = {'feature_layers': (0, 1)}
  for drafter in (
    drafters.Medusa(**make),
    drafters.Hydra(**make),
    drafters.PARD(**make, mask_token_id=3),
    drafters.PEagle(**make, **features, mask_token_id=3),
    drafters.DFlash(**make, **features, num_layers=1),
    drafters.Ngram(num_draft_tokens=2),
  ):
    assert of(drafter) == [0.0, 0.8, 0.8]
  for drafter in (drafters.Chain(**make), drafters.MTP(**make)):
    assert of(drafter) == [0.0, 0.4, 0.8]


def test_drafts_beyond_the_timed_passes_are_left_out(
  cache, shelf, passes_take, drafting_takes
):
  passes_take(_FLAT)
  drafting_takes(0.05)
  measured = {
    'acceptance_by_position': [0.99] * 20,
    'tokens_by_nodes': {'1': 1.1, '31': 9.0},
  }
  _ship(shelf, 'long', [0.99] * 20, on_questions=measured)
  choice = specsample.auto(_TARGET, drafter=str(shelf / 'tiny' / 'long'))
  assert choice.drafter.drafter.num_draft_tokens == 15


def test_a_target_with_little_room_is_timed_after_fewer_tokens(
  cache, monkeypatch
):
  small = dataclasses.replace(_MODEL, max_length=64)
  target = specsample.Loaded(small, small.init(jax.random.key(0)), None)
  lengths = []
  monkeypatch.setattr(
    *(round_costs.pass_times, 'drafting'),
    lambda *_, length, **__: (lengths.append(length), [0.1])[1],
  )
  drafter = drafters.Chain(model=small, num_draft_tokens=3)
  round_costs.drafting_seconds(target, drafter, target.params, 1)
  assert lengths == [60]


def test_a_mesh_has_times_of_its_own(cache, monkeypatch):
  times = iter(([1.0], [2.0]))
  monkeypatch.setattr(
    *(round_costs.pass_times, 'passes'), lambda *_, **__: {1: next(times)}
  )
  assert round_costs.pass_seconds(_TARGET, 1) == {'1': [1.0]}
  with jax.set_mesh(sharding.make_mesh(data=1, model=1)):
    assert round_costs.pass_seconds(_TARGET, 1) == {'1': [2.0]}
    assert round_costs.pass_seconds(_TARGET, 1) == {'1': [2.0]}
  assert round_costs.pass_seconds(_TARGET, 1) == {'1': [1.0]}


def test_a_batch_of_none_is_refused():
  with pytest.raises(ValueError, match='batch_size is 0: give an integer of'):
    specsample.auto(_TARGET, batch_size=0)


def test_a_budget_has_the_costs_of_this_machine(cache, monkeypatch):
  calls = []

  def seconds(*args, **kwargs):
    calls.append(kwargs)
    of_nodes = {'0': 1.3, '1': 1.7, '3': 1.6, '7': 2.3, '9': 2.9}
    return {name: [x, 9.0] for name, x in {'plain': 1.0, **of_nodes}.items()}

  monkeypatch.setattr(round_costs.tree_rounds, 'seconds', seconds)
  drafter = drafters.NgramTree(num_branches=1, depth=9)
  budget = choosing.budget(_TARGET, drafter, None, batch_size=3)
  assert budget.ladder == (0, 1, 3, 7, 9)
  # Without the draft, and no cheaper than of fewer nodes.
  assert budget.costs == pytest.approx((1.0, 1.4, 1.4, 2.0, 2.6))
  assert budget.drafting == pytest.approx(0.3)
  choosing.budget(_TARGET, drafter, None, batch_size=4)
  assert [call['batch'] for call in calls] == [3, 4]
  choosing.budget(_TARGET, drafter, None, batch_size=3)
  assert len(calls) == 3  # times that differ so much are not kept
