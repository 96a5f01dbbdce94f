"""Each row takes one of two drafts; what each drafter learns by it.

That the trained drafter misses nothing is in tests/contract/test_drafters.py.
"""

import dataclasses
import functools
import itertools

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
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.memory import store as store_lib
from specsample.sampling import Sampling
from specsample.types import DraftKind
from tests.drafters import rounds

_V, _TARGET = rounds.V, rounds.TARGET
_CHAIN = drafters.Chain(model=_TARGET, num_draft_tokens=2)
# Longer than the drafts of the trained drafter.
_SUFFIX = drafters.Suffix(num_draft_tokens=5, min_kept=0.2)
_EITHER = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)
_PROMPTS = rounds.PROMPTS[:3]
_LENGTHS = np.asarray([6, 1, 4], np.int32)


@functools.cache
def _target_only():
  return {'target': rounds.target_params()}


def _start(drafter, params, prompts=_PROMPTS, lengths=_LENGTHS, **changes):
  settings = {'rule': verify.chain, 'temperature': 0.0, 'model': _TARGET}
  settings |= changes
  return specsample.prefill(
    Decoder(settings['model'], drafter, settings['rule']),
    params,
    prompts,
    lengths,
    jax.random.key(0),
    sampling=Sampling(temperature=settings['temperature']),
    max_new_tokens=40,
    max_length=80,
  )


def _advance(drafter, params, state, max_rounds, rule=verify.chain):
  return specsample.advance(
    Decoder(_TARGET, drafter, rule),
    params,
    jax.tree.map(jnp.copy, state),
    max_rounds=jnp.int32(max_rounds),
  )


@functools.cache
def _plain():
  drafter = drafters.NoDraft()
  return _advance(drafter, _target_only(), _start(drafter, _target_only()), 80)


@functools.cache
def _params():
  """Returns parameters with a store of row 0's output and part of row 1's."""
  tokens = np.asarray(_plain().tokens)
  texts = [tokens[0, : _LENGTHS[0] + 16], tokens[1, 9:24]]
  store = store_lib.build(texts, vocab_size=_V, capacity=64)
  trained = jax.tree.map(lambda x: 1.02 * x, rounds.target_params())
  own = {'remembered': {'store': store}, 'trained': trained}
  return _target_only() | {'drafter': own}


def _kept(before, after):
  """Counts the drafts that a round kept in each row, -1 if it emitted none."""
  of_round = after.accepted - before.accepted
  return np.where(of_round.any(axis=1), of_round.argmax(axis=1), -1)


@pytest.mark.slow
@pytest.mark.parametrize('is_tree', [False, True])
def test_greedy_output_is_the_targets_own(is_tree):
  drafter, rule = _EITHER, verify.chain
  if is_tree:
    trees = drafters.Tree(drafter=_CHAIN, topology=tree.Topology((0, 0, 1, 2)))
    drafter = dataclasses.replace(_EITHER, trained=trees)
    rule = verify.tree
  states, lengths = [_start(drafter, _params(), rule=rule)], []
  while not np.all(states[-1].done):
    states.append(_advance(drafter, _params(), states[-1], 1, rule))
  for before, state in itertools.pairwise(states[:9]):
    lengths += _kept(before, state)[state.draft.is_remembered].tolist()
  assert not np.any(states[8].done)
  # Rows of one batch chose differently.
  chosen = [int(state.draft.is_remembered.sum()) for state in states[1:9]]
  assert set(chosen) >= {1, 2, 3}
  # Longer than any draft of the trained drafter; and some drafts were wrong.
  assert max(lengths) > _CHAIN.depth > min(lengths)
  plain, found = _plain(), states[-1]
  np.testing.assert_array_equal(found.length, plain.length)
  for row, length in enumerate(plain.length):
    np.testing.assert_array_equal(
      found.tokens[row, :length], plain.tokens[row, :length]
    )
  assert np.all(found.round < plain.round)


_PASSES: list[int] = []


@dataclasses.dataclass(frozen=True)
class _Counting(type(_TARGET)):
  """The same model, but it reports each pass."""

  def apply(self, *args, **kwargs):
    jax.debug.callback(_PASSES.append, 1)
    return super().apply(*args, **kwargs)


@pytest.mark.slow
def test_where_all_rows_remember_the_trained_drafter_does_not_run():
  fields = dataclasses.fields(_TARGET)
  model = _Counting(**{x.name: getattr(_TARGET, x.name) for x in fields})
  trained = dataclasses.replace(_CHAIN, model=model)
  drafter = dataclasses.replace(_EITHER, trained=trained)
  state = _start(drafter, _params())
  ran = set()
  for _ in range(8):
    jax.effects_barrier()
    _PASSES.clear()
    state = _advance(drafter, _params(), state, 1)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert not np.any(state.done)
    ran.add((bool(np.all(state.draft.is_remembered)), bool(_PASSES)))
  assert ran == {(True, False), (False, True)}


@pytest.mark.slow
def test_nothing_is_learned_of_the_other_drafter():
  policy = policies.Fastest(costs=(1.0, 1.1, 1.2), patience=1)
  trained = drafters.Adaptive(drafter=_CHAIN, policies=(policy,), widths=(0, 1))
  drafter = dataclasses.replace(_EITHER, trained=trained, decay=0.5)
  state = _start(drafter, _params())
  np.testing.assert_allclose(state.draft.kept, drafter.prior_kept)
  of_row = lambda state, row: jax.tree.map(
    lambda x: np.asarray(x[row]).tolist(),
    (state.draft.trained.policies[0].reached, state.draft.kept),
  )
  num_seen = {True: 0, False: 0}
  for _ in range(10):
    before, state = state, _advance(drafter, _params(), state, 1)
    is_drafted = (state.proposed - before.proposed)[:, 0] == 0
    for row in np.flatnonzero(is_drafted):
      (reached, mean), (old_reached, old_mean) = (
        of_row(state, row),
        of_row(before, row),
      )
      is_remembered = bool(state.draft.is_remembered[row])
      num_seen[is_remembered] += 1
      if is_remembered:
        assert (reached, mean) == (old_reached, old_mean)
      else:
        assert reached != old_reached
        kept = _kept(before, state)[row]
        np.testing.assert_allclose(mean, (old_mean + kept) / 2, rtol=1e-6)
  assert not np.any(state.done)
  assert min(num_seen.values()) > 3


@pytest.mark.slow
def test_of_drafts_that_another_filter_cut_nothing_is_learned():
  fastest = policies.Fastest(costs=(1.0, 1.1, 1.2), patience=1)
  cut = (fastest, policies.Fixed(0), policies.TokenProbability(1.0))
  trained = drafters.Adaptive(drafter=_CHAIN, policies=cut)
  drafter = dataclasses.replace(_EITHER, trained=trained)
  after = _advance(drafter, _params(), _start(drafter, _params()), 10)
  has_drafted = np.asarray(after.proposed)[:, 1:].sum(axis=1) > 0
  assert np.any(has_drafted)
  # Remembered drafts were kept, which says nothing about the trained drafter.
  learned, *_ = after.draft.trained.policies
  assert np.all(np.asarray(learned.reached)[:, 0] > 0)
  assert not np.any(np.asarray(learned.kept))


def test_both_drafters_logits_are_computed_if_one_reads_them():
  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Reader(drafters.Chain):
    reads_logits = True

  reader = Reader(model=_TARGET, num_draft_tokens=2)
  assert dataclasses.replace(_EITHER, trained=reader).reads_logits
  assert not _EITHER.reads_logits


@pytest.mark.slow
def test_drawn_and_remembered_tokens_have_one_kind():
  drafter = dataclasses.replace(_EITHER, prior_kept=0.3)
  start = _start(drafter, _params(), temperature=1.0)
  decoder = Decoder(_TARGET, drafter, verify.block)
  draft, state = step.propose(decoder, _params(), start)
  assert draft.kind is DraftKind.SAMPLED
  assert state.is_remembered.tolist() == [True, False, False]
  tokens, probs = np.asarray(draft.tokens), np.asarray(draft.probs)
  # A point mass at each remembered token.
  np.testing.assert_array_equal(probs[0], np.eye(_V)[tokens[0]])
  # The other rows equal what the trained drafter alone draws, bit for bit.
  alone = dataclasses.replace(start, draft=start.draft.trained)
  decoder = Decoder(_TARGET, drafter.trained, verify.block)
  own = _target_only() | {'drafter': _params()['drafter']['trained']}
  expected, _ = step.propose(decoder, own, alone)
  np.testing.assert_array_equal(tokens[1:, :2], expected.tokens[1:])
  np.testing.assert_array_equal(probs[1:, :2], expected.probs[1:])
  assert 0 < probs[1:, :2].max() < 1
  # Shorter drafts are padded with missing tokens.
  assert np.all(tokens[1:, 2:] == -1) and not probs[1:, 2:].any()


@pytest.mark.slow
def test_of_two_point_masses_the_draft_is_one():
  model = testing.HashModel(vocab_size=_V)
  drafter = drafters.Either(
    remembered=drafters.Suffix(num_draft_tokens=3, min_kept=0.8),
    trained=drafters.Ngram(num_draft_tokens=2, min_ngram=1, max_ngram=1),
  )
  store = store_lib.build([[3, 4, 5, 6, 7]] * 8, vocab_size=_V)
  own = {'target': {}, 'drafter': {'remembered': {'store': store}}}
  rows = np.asarray([[1, 3, 8, 9, 3, 4, 5], [1, 8, 2, 9, 2, 0, 8]])
  state = _start(drafter, own, rows, np.asarray([7, 7]), model=model)
  draft, _ = step.propose(Decoder(model, drafter, verify.chain), own, state)
  assert (draft.kind, draft.probs) == (DraftKind.POINT_MASS, None)
  assert draft.tokens.tolist() == [[6, 7, -1], [2, 9, -1]]


@pytest.mark.parametrize(
  ('own', 'message'),
  [
    ({'store': {}}, r"the keys \['store'\]: give only 'remembered'"),
    (
      {'remembered': {'store': {}}, 'trained': {}},
      r"\['store'\] is of type dict, but Suff",
    ),
  ],
)
def test_parameters_by_wrong_names_are_refused(own, message):
  with pytest.raises(ValueError, match=message):
    _start(_EITHER, _target_only() | {'drafter': own})


@pytest.mark.parametrize('own', [{}, {'drafter': {'trained': {'a': 1}}}])
def test_store_is_added_beside_what_is_there(own):
  store = _params()['drafter']['remembered']['store']
  found = _EITHER.with_store({'target': {}} | own, 'history', store)
  expected = own.get('drafter', {}) | {'remembered': {'history': store}}
  assert found == {'target': {}, 'drafter': expected}
