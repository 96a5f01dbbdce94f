"""`auto` chooses by the machine's pass times and the drafters' cards."""

import dataclasses
import functools
import itertools

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


def test_least_times_count_and_never_fall():
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


def test_speedup_is_tokens_over_what_a_round_costs():
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
def test_tree_has_as_many_nodes_as_pay(
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


class _Here:
  """A machine whose passes take given times, and its shelf of drafters."""

  def __init__(self, folder, monkeypatch):
    self.patch, self.shelf = monkeypatch.setattr, folder / 'shelf'
    monkeypatch.setenv('SPECSAMPLE_CACHE', str(folder / 'times'))
    self.patch(card_lib, '_SHELVES', (self.shelf,))

  def take(self, passes=None, drafting=None, rounds=None):
    """Sets the seconds of passes by their size, of any draft, and of rounds.

    Rounds are by their names: 'plain', and their numbers of nodes.
    """
    parts = round_costs.pass_times
    if passes is not None:
      of_sizes = {n: [x, 1.1 * x] for n, x in passes.items()}
      self.patch(parts, 'passes', lambda *_, **__: of_sizes)
    if drafting is not None:
      self.patch(parts, 'drafting', lambda *_, **__: [drafting])
    if rounds is not None:
      of_rounds = {name: [x, x] for name, x in rounds.items()}
      seconds = lambda *_, **__: of_rounds
      self.patch(round_costs.tree_rounds, 'seconds', seconds)

  def count(self, part, as_times):
    """Has passes or drafts take 1 second when first timed, then 2, ..."""
    numbers = itertools.count(1)
    self.patch(
      round_costs.pass_times,
      part,
      lambda *_, **__: as_times(float(next(numbers))),
    )

  def ship(
    self, name, shares, target=_TARGET, make=drafters.Hydra, **on_questions
  ):
    """Puts a drafter on the shelf whose drafts are kept in such shares.

    If there are no shares, nothing is known of its two drafts.
    """
    drafter = make(model=_MODEL, num_draft_tokens=len(shares) or 2)
    card = {'held_out': {'acceptance_by_position': shares}} if shares else {}
    if on_questions:
      card['on_questions'] = on_questions
    self.shelf.joinpath('tiny').mkdir(parents=True, exist_ok=True)
    specsample.save_drafter(
      self.shelf / 'tiny' / name,
      drafter,
      drafter.init_params(jax.random.key(1), target.params),
      target=target,
      card=card,
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
  return _Here(tmp_path, monkeypatch)


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


_OTHER = specsample.Loaded(_MODEL, _MODEL.init(jax.random.key(9)), None)
_DSPARK = functools.partial(
  drafters.DSpark, feature_layers=(0, 1), num_layers=1, rank=4
)
_OWN_TEXT = (
  'drafts up to 7 tokens from its own text where that promises more than the '
  'wider round costs (1.60 plain passes here)'
)
_POOR = '; trained drafters do not pay off (the best, '
# By case: the seconds of passes and perhaps of a draft, what is shipped, the
# drafter that is named, and why it is chosen.
_REASONS = {
  'nothing that pays': (
    (_STEEP,),
    {},
    None,
    'decodes plainly: a round of 3 draft tokens costs 4.05 plain passes here',
  ),
  'no card': ((_CORES,), {}, None, _OWN_TEXT),
  # 3.1 / (t(4) + .05 + .05); a pass over 4 tokens takes 1.475.
  'a trained drafter that promises enough': (
    (_CORES, 0.05),
    {
      'good': {'shares': [0.8, 0.7, 0.6]},
      'bad': {'shares': [0.9, 0.9], 'acceptance_by_position': [0.2, 0.1]},
      'of another target': {'shares': [0.9, 0.9, 0.9], 'target': _OTHER},
    },
    None,
    f'{_OWN_TEXT}, otherwise up to 3 with good, which promises 1.97x',
  ),
  # 1.3 tokens for a pass over 3 tokens and .05 for the rest of the round.
  'a trained drafter that does not pay': (
    (_CORES,),
    {'bad': {'shares': [0.2, 0.1]}},
    None,
    f'{_OWN_TEXT}{_POOR}bad, promises 0.87x)',
  ),
  # At most 1.07x, if drafting took no time; and 2.5 / (t(3) + 1 + .05).
  'one that was timed and does not pay': (
    (_CORES, 1.0),
    {'slow': {'shares': [0.8, 0.7]}, 'poor': {'shares': [0.3, 0.3]}},
    None,
    f'{_OWN_TEXT}{_POOR}slow, promises 1.00x)',
  ),
  # 2.5 / (t(3) + .05 + .05).
  'the number of drafts of a named drafter': (
    (_CORES, 0.05),
    {'good': {'shares': [0.8, 0.7, 0.01]}, 'better': {'shares': [0.9] * 3}},
    'tiny/good',
    'drafts up to 2 with good, which promises 1.61x',
  ),
  # No drafts of a third position were drafted where that was held out.
  'a card that says less of questions': (
    (_CORES, 0.05),
    {'good': {'shares': [0.8, 0.7, None], 'tokens_by_nodes': {'1': 9.0}}},
    'tiny/good',
    'drafts up to 2 with good, which promises 1.61x',
  ),
  # 1.3 / (t(3) + .05 + .05).
  'a named drafter that does not pay': (
    (_CORES, 0.05),
    {'bad': {'shares': [0.2, 0.1]}},
    'tiny/bad',
    'decodes plainly: bad promises 0.84x here',
  ),
}


@pytest.mark.slow(but=('a trained drafter that promises enough',))
@pytest.mark.parametrize('case', _REASONS)
def test_reason_says_what_was_chosen_and_what_it_promises(here, case):
  times, shipped, named, reason = _REASONS[case]
  here.take(*times)
  for name, settings in shipped.items():
    here.ship(name, **settings)
  choice = specsample.auto(_TARGET, drafter=named)
  assert choice.reason == reason
  if reason.startswith('decodes plainly'):
    assert choice.drafter == drafters.NoDraft()
    assert choice.params(_TARGET) == {'target': _TARGET.params}
  elif named is not None:
    assert isinstance(choice.drafter, drafters.Adaptive)
  elif 'otherwise' in reason:
    assert choice.drafter.trained.drafter.num_draft_tokens == 3
    _is_greedy(choice)
  else:
    # A drafting round costs .05 on top of the pass.
    costs = (1.0, 1.45, 1.5, 1.525, 1.55, 1.567, 1.583, 1.6)
    expected = drafters.Suffix(num_draft_tokens=7, costs=costs)
    assert choice.drafter == expected


def test_uneven_times_are_not_chosen_by_nor_kept(here):
  times = lambda *_, **__: {n: [0.02, 0.04, 0.05] for n in _SIZES}
  here.patch(round_costs.pass_times, 'passes', times)
  choice = specsample.auto(_TARGET)
  assert choice.drafter == drafters.NoDraft()
  assert choice.reason.startswith('decodes plainly: a pass took 20 to 50 ms')
  here.take(_FLAT)
  assert specsample.auto(_TARGET).drafter.num_draft_tokens == 15


def test_drafters_that_cannot_promise_more_are_not_timed(here):
  here.take(_CORES)
  timed = []

  def draft_seconds(params, model, drafter, **_):
    timed.append(drafter.num_draft_tokens)
    return [0.05]

  here.patch(round_costs.pass_times, 'drafting', draft_seconds)
  here.ship('good', [0.8, 0.7, 0.6])
  # At most 1.67x, if drafting took no time.
  here.ship('another', [0.8, 0.7])
  choice = specsample.auto(_TARGET)
  assert timed == [3]
  assert 'with good, which promises 1.97x' in choice.reason


@pytest.mark.slow
def test_tree_is_drafted_where_it_promises_more_than_all_else(here):
  here.take(_FLAT, 0.05)
  ship = functools.partial(
    here.ship, shares=[0.3, 0.09], acceptance_by_position=[0.3, 0.09]
  )
  ship('good', acceptance_by_rank=[[0.3, 0.3, 0.3]] * 2)
  choice = specsample.auto(_TARGET)
  # 1 + .9 + .81 tokens; drafting costs .05 and the rest of the round .05.
  assert choice.reason.endswith(
    ', otherwise trees of 12 tokens, up to 2 deep, with good, which promises '
    '2.46x'
  )
  assert choice.verify is specsample.verify.tree
  assert choice.drafter.trained.drafter.topology.num_nodes == 12
  _is_greedy(choice)
  # Ranks deeper than the drafter are left out.
  ship('deep', acceptance_by_rank=[[0.3, 0.2]] + [[0.9, 0.1]] * 3)
  choice = specsample.auto(_TARGET, drafter='tiny/deep')
  assert choice.drafter.drafter.topology.depth == 2


def test_trees_of_a_lattice_are_as_wide_as_pays(here):
  rounds = {'plain': 1.0, '0': 1.1, '1': 1.3, '3': 1.4, '7': 1.6, '15': 2.2}
  here.take(_CORES, 0.05, rounds)
  measured = {
    'acceptance_by_position': [0.3, 0.09],
    'tokens_by_nodes': {'1': 1.3, '7': 2.55, '15': 2.6},
  }
  here.ship('good', [0.3, 0.09], make=_DSPARK, **measured)
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # 2.55 / (t(8) + .05 + .05).
  assert choice.reason == (
    'drafts trees of up to 15 tokens, as wide as pays, with good, which '
    'promises 1.55x'
  )
  assert choice.drafter.widths == (0, 1, 3, 7, 15)
  assert choice.verify is specsample.verify.tree
  together = specsample.auto(_TARGET)
  assert together.drafter.trained == choice.drafter
  _is_greedy(together)


def test_trees_whose_whole_rounds_take_too_long_make_way_for_chains(here):
  rounds = {'plain': 1.0, '0': 1.1, '1': 2.0, '3': 2.2, '7': 2.6}
  here.take(_CORES, 0.05, rounds)
  measured = {
    'acceptance_by_position': [0.8, 0.7],
    'tokens_by_nodes': {'1': 1.8, '7': 3.2},
  }
  here.ship('good', [0.8, 0.7], make=_DSPARK, **measured)
  choice = specsample.auto(_TARGET, drafter='tiny/good')
  # By its parts 3.2 / (t(8) + .1) = 1.95, by whole rounds 3.2 / 2.6 = 1.23.
  assert choice.reason == 'drafts up to 2 with good, which promises 1.61x'
  assert isinstance(choice.drafter, drafters.Adaptive)
  _is_greedy(choice)


@pytest.mark.slow
def test_drafts_beyond_the_timed_passes_are_left_out(here):
  here.take(_FLAT, 0.05)
  measured = {
    'acceptance_by_position': [0.99] * 20,
    'tokens_by_nodes': {'1': 1.1, '31': 9.0},
  }
  here.ship('long', [0.99] * 20, **measured)
  choice = specsample.auto(_TARGET, drafter=str(here.shelf / 'tiny' / 'long'))
  assert choice.drafter.drafter.num_draft_tokens == 15


def test_times_are_of_one_form_of_the_matrices_and_one_mesh(here):
  here.count('passes', lambda x: {1: [x]})
  seconds = lambda target: round_costs.pass_seconds(target, 1)['1'][0]
  of_int8 = dataclasses.replace(_TARGET, params=int8.weights(_TARGET.params))
  targets = (_TARGET, of_int8, _TARGET, of_int8)
  assert [seconds(target) for target in targets] == [1, 2, 1, 2]
  with jax.set_mesh(sharding.make_mesh(data=1, model=1)):
    assert seconds(_TARGET) == seconds(_TARGET) == 3
  assert seconds(_TARGET) == 1


def test_drafters_in_other_forms_are_timed_apart(here):
  here.count('drafting', lambda x: [x])
  hydra = drafters.Hydra(model=_MODEL, num_draft_tokens=2)
  own = hydra.init_params(jax.random.key(1), _TARGET.params)
  seconds = lambda own: round_costs.drafting_seconds(_TARGET, hydra, own, 1)[-1]
  assert [seconds(x) for x in (own, int8.weights(own), own)] == [1, 2, 1]


def test_drafts_that_one_pass_makes_cost_the_same_at_every_length(here):
  here.take(drafting=0.8)
  make = {'model': _MODEL, 'num_draft_tokens': 2}
  features = {'feature_layers': (0, 1)}
  for drafter, seconds in (
    (drafters.Medusa(**make), [0.0, 0.8, 0.8]),
    (drafters.Hydra(**make), [0.0, 0.8, 0.8]),
    (drafters.PARD(**make, mask_token_id=3), [0.0, 0.8, 0.8]),
    (drafters.PEagle(**make, **features, mask_token_id=3), [0.0, 0.8, 0.8]),
    (drafters.DFlash(**make, **features, num_layers=1), [0.0, 0.8, 0.8]),
    (drafters.Ngram(num_draft_tokens=2), [0.0, 0.8, 0.8]),
    (drafters.Chain(**make), [0.0, 0.4, 0.8]),
    (drafters.MTP(**make), [0.0, 0.4, 0.8]),
  ):
    assert round_costs.drafting_seconds(_TARGET, drafter, {}, 1) == seconds


def test_target_with_little_room_is_timed_after_fewer_tokens(here):
  small = dataclasses.replace(_MODEL, max_length=64)
  target = specsample.Loaded(small, small.init(jax.random.key(0)), None)
  lengths = []

  def seconds(*_, length, **__):
    lengths.append(length)
    return [0.1]

  here.patch(round_costs.pass_times, 'drafting', seconds)
  drafter = drafters.Chain(model=small, num_draft_tokens=3)
  round_costs.drafting_seconds(target, drafter, target.params, 1)
  assert lengths == [60]


_THREE = specsample.LoadedDrafter(
  drafters.Ngram(num_draft_tokens=3), None, card={}
)


@pytest.mark.parametrize(
  ('ask', 'message'),
  [
    (
      lambda: specsample.auto(_TARGET, batch_size=0),
      'batch_size is 0: give an integer of',
    ),
    (lambda: specsample.auto(_TARGET, drafter='tiny/foreign'), 'target'),
    (
      lambda: specsample.auto(_TARGET, drafter='tiny/unmeasured'),
      'unmeasured does not say how many of',
    ),
    # Costs are of as many tokens as the drafter drafts.
    (
      lambda: round_costs.costs(_TARGET, 4, trained=_THREE),
      'is 4, but the drafter drafts 3',
    ),
  ],
)
def test_what_cannot_be_chosen_is_refused(here, ask, message):
  here.take(_CORES)
  here.ship('foreign', [0.9, 0.9, 0.9], _OTHER)
  here.ship('unmeasured', [])
  with pytest.raises(ValueError, match=message):
    ask()


def test_budget_has_the_costs_of_this_machine(here):
  calls = []

  def seconds(*args, **kwargs):
    calls.append(kwargs)
    of_nodes = {'0': 1.3, '1': 1.7, '3': 1.6, '7': 2.3, '9': 2.9}
    return {name: [x, 9.0] for name, x in {'plain': 1.0, **of_nodes}.items()}

  here.patch(round_costs.tree_rounds, 'seconds', seconds)
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
