"""Held-out statistics: replayed from answers, by decoding, and of trees."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.decoding import rounds
from experiments.decoding import setup as setup_lib
from experiments.training import held_out
from experiments.training import training as training_lib
import specsample
from specsample import drafters
from specsample import stats as stats_lib
from specsample import testing
from specsample import tree
from specsample.drafters import feature_chain
from specsample.models import transformer
from specsample.testing import trained
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads

_VOCAB_SIZE = 5
_PROMPT_LENGTH = 4
_NEW_TOKENS = 60
_NAMES = [
  kind.name
  for kind in trained.CASES
  if kind.name not in ('P-EAGLE', 'Assistant')  # nothing trains these
]
# A class comes before the one that it extends.
_OBJECTIVES = {
  drafters.DraftModel: draft.DraftObjective,
  drafters.DSpark: dflash.DSparkObjective,
  drafters.DFlash2: dflash.DFlash2Objective,
  drafters.DFlash: dflash.DFlashObjective,
  feature_chain.FeatureChain: eagle.FeatureObjective,
  object: heads.HeadsObjective,
}


def _objective(drafter):
  kind = next(kind for kind in _OBJECTIVES if isinstance(drafter, kind))
  return _OBJECTIVES[kind](drafter=drafter)


@functools.cache
def _scene(name):
  return trained.scene(name, _VOCAB_SIZE)


@pytest.mark.slow
@pytest.mark.nightly(
  but=(
    'Hydra++-eos_ids0',
    'DSpark-eos_ids0',
    'DSpark, gated-eos_ids0',
    'DSpark, RNN-eos_ids0',
    'MTP-eos_ids0',
  )
)
@pytest.mark.parametrize('eos_ids', [(), (3,)])
@pytest.mark.parametrize('name', _NAMES)
def test_counts_are_those_of_decoding(name, eos_ids):
  case = _scene(name)
  rng = np.random.default_rng(0)
  prompts = rng.integers(_VOCAB_SIZE, size=(6, _PROMPT_LENGTH))
  output = specsample.generate(
    case.params,
    prompts,
    np.full(len(prompts), _PROMPT_LENGTH),
    jax.random.key(0),
    model=case.model,
    drafter=case.drafter,
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=_NEW_TOKENS,
    stop=specsample.Stop(eos_ids=eos_ids),
  )
  tokens = np.concatenate([prompts, output.tokens], axis=1)
  index = np.arange(tokens.shape[1]) - _PROMPT_LENGTH
  mask = (index >= 0) & (index < output.lengths[:, None])
  # A row without an answer fills up the batch.
  tokens = np.pad(tokens, ((0, 1), (0, 3)))
  mask = np.pad(mask, ((0, 1), (0, 3)))
  loss, stats = held_out.evaluate(
    case.params,
    [{'tokens': tokens, 'mask': mask}],
    _objective(case.drafter),
    eos_ids,
  )
  assert np.isfinite(loss)
  assert stats == stats_lib.summarize(output)
  # Some drafts are accepted, but not all.
  assert stats.rounds < stats.tokens < stats.rounds * len(stats.accepted)


def test_replay_goes_from_round_to_round():
  # One row: a prompt of 2 tokens and an answer of 6.
  mask = np.arange(8)[None] >= 2
  matches = np.zeros((2, 1, 8), bool)
  matches[0, 0, [1, 4, 6]] = True
  matches[1, 0, [1, 3]] = True
  # Pending 1: both kept, emits 3; pending 4: one kept, emits 2; pending 6: the
  # limit leaves no room for a draft.
  ends = np.zeros(mask.shape, bool)
  stats = held_out.replay(matches, mask, ends)
  assert stats == stats_lib.Stats(
    tokens=6, rounds=3, proposed=(1, 0, 2), accepted=(1, 1, 1)
  )
  # If the text ends there, the last round has room for drafts.
  ends[0, 7] = True
  stats = held_out.replay(matches, mask, ends)
  assert stats == stats_lib.Stats(
    tokens=6, rounds=3, proposed=(0, 0, 3), accepted=(0, 2, 1)
  )


def test_replay_begins_anew_with_each_answer():
  # Two answers of 3 tokens, at 2 and at 8; the first one ends the text.
  mask = np.zeros((1, 12), bool)
  mask[0, [2, 3, 4, 8, 9, 10]] = True
  ends = np.arange(12)[None] == 4
  matches = np.zeros((2, 1, 12), bool)
  matches[0, 0, [1, 3, 8]] = True
  # Pending 1: one kept, emits 2; pending 3: drafts the end, emits it. Pending
  # 7: none kept; pending 8: the limit leaves room for one, kept, emits 2.
  stats = held_out.replay(matches, mask, ends)
  assert stats == stats_lib.Stats(
    tokens=6, rounds=4, proposed=(0, 1, 3), accepted=(1, 3, 0)
  )


@pytest.mark.slow
def test_counts_of_batches_are_added():
  case = _scene('Medusa')
  rng = np.random.default_rng(1)
  tokens = rng.integers(_VOCAB_SIZE, size=(4, 12))
  mask = np.broadcast_to(np.arange(12) >= 3, tokens.shape)
  batch = lambda rows: {'tokens': tokens[rows], 'mask': mask[rows]}
  evaluate = lambda batches: held_out.evaluate(
    case.params, batches, _objective(case.drafter)
  )
  loss, stats = evaluate([batch(slice(0, 4))])
  losses, parts = evaluate([batch(slice(0, 2)), batch(slice(2, 4))])
  # Batch means are weighted by their number of learned tokens.
  np.testing.assert_allclose(losses, loss, rtol=0.1)
  assert dataclasses.astuple(parts) == dataclasses.astuple(stats)


@pytest.fixture(scope='module')
def training(checkpoint):
  target = specsample.load(checkpoint)
  drafter = drafters.Medusa(model=target.model, num_draft_tokens=2)
  return training_lib.Training(
    target=target,
    objective=heads.HeadsObjective(drafter=drafter),
    decoded_prompts=3,
    decoded_prompt_tokens=5,
    decoded_new_tokens=12,
  )


_PROMPTS = [np.arange(i, i + 4 + i, dtype=np.int32) for i in range(7)]


def test_prompts_are_spread_evenly_and_cut(training):
  chosen = held_out.choose_prompts(training, _PROMPTS)
  assert chosen == [[0, 1, 2, 3], [3, 4, 5, 6, 7], [7, 8, 9, 10, 11]]
  many = dataclasses.replace(training, decoded_prompts=100)
  assert len(held_out.choose_prompts(many, _PROMPTS)) == 7
  large = dataclasses.replace(training, decoded_prompt_tokens=501)
  with pytest.raises(ValueError, match='the target takes 512 tokens: lower'):
    held_out.choose_prompts(large, _PROMPTS)


@pytest.mark.slow
def test_other_weights_are_no_other_executable(training, num_compiled):
  drafter = training.objective.drafter
  own = drafter.init_params(jax.random.key(0))
  prompts = held_out.choose_prompts(training, _PROMPTS)

  def decode(own):
    params = {'target': training.target.params, 'drafter': own}
    return held_out.decode(held_out.setup(training, params), prompts)

  first = decode(own)
  count = num_compiled()
  other = decode(testing.with_noise(own, jax.random.key(1)))
  assert num_compiled() == count
  for found in (first, other):
    assert found.tokens == 3 * 12
    assert 12 <= found.rounds <= 3 * 12


# The pending token's children are 1, 2 and 5, and node 1's are 3 and 4.
_MIXED = tree.Topology((0, 0, 1, 1, 0, 4))
_DRAFTED = (7, 8, 3, 4, 9, 5)
_NOTHING = ((0, 0, 0),) * 3
_SHORT = [[1, 2, 3, 4], [9, 8], [30, 31, 32]]


@pytest.mark.parametrize(
  ('path', 'num_emitted', 'tried', 'kept'),
  [
    # A whole path, and a token after it.
    (
      (1, 4, 6),
      4,
      ((1, 0, 0), (1, 1, 0), (1, 0, 0)),
      ((1, 0, 0), (0, 1, 0), (1, 0, 0)),
    ),
    # The third child, which has no children.
    ((5,), 2, ((1, 1, 1), *_NOTHING[1:]), ((0, 0, 1), *_NOTHING[1:])),
    # A correction.
    ((1,), 2, ((1, 0, 0), (1, 1, 0), (0, 0, 0)), ((1, 0, 0), *_NOTHING[1:])),
    # Nothing is tried after a stop token, or in a row that is done.
    ((2,), 1, ((1, 1, 0), *_NOTHING[1:]), ((0, 1, 0), *_NOTHING[1:])),
    ((), 0, _NOTHING, _NOTHING),
  ],
)
def test_round_is_counted_as_by_hand(path, num_emitted, tried, kept):
  found = held_out.count_tried(_MIXED, _DRAFTED, path, num_emitted)
  np.testing.assert_array_equal(found, (tried, kept))


def test_what_was_not_drafted_was_not_tried():
  found = held_out.count_tried(_MIXED, (7, 8, -1, -1, 9, -1), (1,), 2)
  first = ((1, 0, 0), *_NOTHING[1:])
  np.testing.assert_array_equal(found, (first, first))


def test_acceptance_is_the_share_of_those_tried():
  tried, kept = ((10, 4, 3), (6, 1, 0)), ((6, 1, 0), (3, 1, 0))
  # Rank 1 keeps a quarter of the remaining .4 and, at depth 2, all of .5.
  expected = [[0.6, 0.4 * 0.25, 0], [0.5, 0.5, 0]]
  found = held_out.acceptance_by_rank(np.asarray((tried, kept)))
  np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.fixture(scope='module')
def setup(checkpoint):
  """A function that returns the setup of a drafter with random weights."""
  target = specsample.load(checkpoint)

  def of(make, **settings):
    drafter = make(model=target.model, **settings)
    own = drafter.init_params(jax.random.key(0), target.params)
    noisy = testing.with_noise(own, jax.random.key(1))
    return setup_lib.Setup(
      target=target,
      method=methods.Method(drafter, params=noisy),
      sampling=specsample.Sampling(temperature=0.0),
      max_new_tokens=40,
      stop=specsample.Stop(eos_ids=(7,)),
    )

  return of


@pytest.mark.slow
def test_ranks_are_those_of_the_rounds_as_they_are_shown(setup):
  """Counts drafts by their fates, which another recorder finds."""
  of_chain = setup(drafters.DraftModel, num_draft_tokens=3, layers=(1,))
  found = held_out.measure_trees(of_chain, _SHORT)['acceptance_by_rank']
  shape = 3, 4
  assert np.shape(found) == shape
  # Four children after the pending token and along two paths.
  parents = [0] * 4 + [1] * 4 + [2] * 4 + [5] * 4 + [9] * 4
  topology = tree.Topology(tuple(parents))
  trees = dataclasses.replace(
    of_chain, method=methods.tree(of_chain.method, topology)
  )
  state = trees.prefill(_SHORT)
  tried, kept = np.zeros(shape), np.zeros(shape)
  while not np.asarray(state.done).all():
    observed, state = rounds.step(trees, state)
    for row in range(len(_SHORT)):
      for shown in rounds.of_row(trees, observed, row):
        for one in shown.candidates:
          at = topology.depths[one.node - 1] - 1, (one.node - 1) % 4
          tried[at] += one.fate in (rounds.KEPT, rounds.REJECTED)
          kept[at] += one.fate == rounds.KEPT
  share = kept / np.maximum(tried, 1)
  earlier = np.zeros(3)
  for rank in range(4):
    expected = (1 - earlier) * share[:, rank]
    np.testing.assert_allclose(np.asarray(found)[:, rank], expected, atol=1e-12)
    earlier += expected
  # At each depth one that is not the first.
  assert (kept[:, 1:].sum(axis=1) > 0).all(), kept


@pytest.mark.slow
def test_lattice_has_the_tokens_per_round_of_its_trees(setup):
  of_chain = setup(
    drafters.DSpark, num_draft_tokens=2, feature_layers=(0, 1), rank=4
  )
  found = held_out.measure_trees(of_chain, _SHORT)
  assert list(found) == ['tokens_by_nodes']
  by_nodes = found['tokens_by_nodes']
  assert list(by_nodes) == ['1', '3', '7', '15']
  tokens, lengths = specsample.pad_prompts(_SHORT)
  output = specsample.generate(
    of_chain.params,
    tokens,
    lengths,
    jax.random.key(1),
    model=of_chain.target.model,
    drafter=drafters.LatticeTree(
      drafter=of_chain.method.drafter, num_draft_tokens=7
    ),
    verify=specsample.verify.tree,
    sampling=of_chain.sampling,
    max_new_tokens=40,
    stop=of_chain.stop,
  )
  num_rounds = sum(
    len(set(row[:length].tolist()))
    for row, length in zip(
      np.asarray(output.emit_round), output.lengths.tolist(), strict=True
    )
  )
  assert by_nodes['7'] == pytest.approx(sum(output.lengths) / num_rounds)


class _OfChains(transformer.Transformer):
  """A target that cannot read trees."""

  def read(self, params, tokens, cache, features=()):
    """See `types.Readable`."""
    return super().read(params, tokens, cache, features)

  def apply(self, params, tokens, cache, features=()):
    """See `types.Model`."""
    return super().apply(params, tokens, cache, features)


@pytest.mark.slow
def test_card_without_trees_says_why(setup, capsys):
  given = setup(drafters.Medusa, num_draft_tokens=2)
  target = given.target
  few = drafters.Medusa(
    model=target.model, num_draft_tokens=2, draft_vocab_size=3
  )
  own = few.init_params(jax.random.key(0), target.params, [1, 2, 3])
  of_few = dataclasses.replace(given, method=methods.Method(few, params=own))
  with pytest.raises(ValueError, match='drafts only 3 different tokens'):
    held_out.measure_trees(of_few, _SHORT)
  model = _OfChains(**vars(target.model))
  drafter = dataclasses.replace(given.method.drafter, model=model)
  of_chains = dataclasses.replace(
    given,
    target=dataclasses.replace(target, model=model),
    method=dataclasses.replace(given.method, drafter=drafter),
  )
  for one, reason in (
    (of_few, 'the tree has 4 sibl'),
    (of_chains, '_OfChains.read'),
  ):
    assert held_out.trees_for_card(one, _SHORT) == {}
    line = capsys.readouterr().out
    assert line.startswith('the card says nothing of trees: ')
    assert reason in line
