"""Each row takes one of two drafts; the trained drafter loses nothing by it."""

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
from specsample.testing import trained as trained_lib
from specsample.testing.sample import Group
from specsample.types import DraftKind

_V = 12
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_MAKE = {'model': _TARGET, 'num_draft_tokens': 2}
_TRAINED = {
  'chain': drafters.Chain(**_MAKE),
  'draft model': drafters.DraftModel(layers=(0, 2), **_MAKE),
  'skip': drafters.Skip(layers=(0, 2), **_MAKE),
  'medusa': drafters.Medusa(**_MAKE),
  'hydra++': drafters.Hydra(prefix_attention=True, **_MAKE),
  'eagle3': drafters.Eagle3(feature_layers=(-1, 1, 0), **_MAKE),
  'mtp': drafters.MTP(num_modules=2, **_MAKE),
  'dflash': drafters.DFlash(feature_layers=(0, 1), num_layers=1, **_MAKE),
  'dspark': drafters.DSpark(
    feature_layers=(0, 1), num_layers=1, rank=4, **_MAKE
  ),
}
_TREES = {
  'chain': drafters.Tree(
    drafter=_TRAINED['chain'], topology=tree.Topology((0, 0, 1, 2))
  ),
  'medusa': drafters.Tree(
    drafter=_TRAINED['medusa'], topology=tree.Topology((0, 0, 1, 2))
  ),
  'eagle3': drafters.Tree(
    drafter=_TRAINED['eagle3'], topology=tree.Topology((0, 0, 1, 2))
  ),
  'hydra++': drafters.DynamicTree(
    drafter=_TRAINED['hydra++'], num_draft_tokens=3
  ),
  'dspark': drafters.LatticeTree(
    drafter=_TRAINED['dspark'], num_draft_tokens=6, candidates=4
  ),
}
_TRAINED |= {f'tree of {name}': drafter for name, drafter in _TREES.items()}
# Longer than the drafts of the trained drafters.
_SUFFIX = drafters.Suffix(num_draft_tokens=5, min_kept=0.2)
_PROMPTS = np.arange(3 * 6).reshape(3, 6) % _V
_LENGTHS = np.asarray([6, 1, 4], np.int32)
_NUM_NEW = 40


@functools.cache
def _target_params():
  return jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))


@functools.cache
def _scene(name):
  """Returns a target, a drafter for it, and the parameters of both."""
  if name == 'tli':
    scene = trained_lib.other_vocabulary()
    drafter = dataclasses.replace(scene.drafter, room=2.0, spare=16)
    return scene.model, drafter, scene.params
  drafter, target = _TRAINED[name], _target_params()
  if name == 'skip':
    return _TARGET, drafter, {'target': target}
  if name.endswith('chain'):
    own = jax.tree.map(lambda x: 1.02 * x, target)
  else:
    inner = drafter.drafter if name.startswith('tree') else drafter
    own = inner.init_params(jax.random.key(1), target)
    own = testing.with_noise(own, jax.random.key(2))
  return _TARGET, drafter, {'target': target, 'drafter': own}


def _rule(name):
  return verify.tree if name.startswith('tree') else verify.chain


def _start(
  model,
  drafter,
  params,
  prompts,
  lengths,
  *,
  temperature=0.0,
  rule=verify.chain,
):
  return specsample.prefill(
    Decoder(model, drafter, rule),
    params,
    prompts % model.vocab_size,
    lengths,
    jax.random.key(0),
    sampling=Sampling(temperature=temperature),
    max_new_tokens=_NUM_NEW,
    max_length=80,
  )


def _advance(model, drafter, params, state, rounds, rule=verify.chain):
  return specsample.advance(
    Decoder(model, drafter, rule),
    params,
    jax.tree.map(jnp.copy, state),
    max_rounds=jnp.int32(rounds),
  )


@functools.cache
def _plain(model):
  params = {} if model != _TARGET else _target_params()
  drafter = drafters.NoDraft()
  start = _start(model, drafter, {'target': params}, _PROMPTS, _LENGTHS)
  return _advance(model, drafter, {'target': params}, start, 80)


def _store(model):
  """Builds a store of row 0's output and a later part of row 1's."""
  tokens = np.asarray(_plain(model).tokens)
  texts = [tokens[0, : _LENGTHS[0] + 16], tokens[1, 9:24]]
  return store_lib.build(texts, vocab_size=model.vocab_size, capacity=64)


def _with_store(params, store):
  """Returns the parameters of an `Either`, given its trained drafter's."""
  own = {'remembered': {'store': store}}
  if 'drafter' in params:
    own['trained'] = params['drafter']
  return {'target': params['target'], 'drafter': own}


@functools.cache
def _rounds(name):
  """Returns the drafter and the states after each round."""
  model, inner, params = _scene(name)
  drafter = drafters.Either(remembered=_SUFFIX, trained=inner)
  own = _with_store(params, _store(model))
  rule = _rule(name)
  states = [_start(model, drafter, own, _PROMPTS, _LENGTHS, rule=rule)]
  while not np.all(states[-1].done):
    states.append(_advance(model, drafter, own, states[-1], 1, rule))
  return drafter, states


def _kept(before, after):
  """Counts the drafts that a round kept in each row, -1 if it emitted none."""
  of_round = after.accepted - before.accepted
  return np.where(of_round.any(axis=1), of_round.argmax(axis=1), -1)


@pytest.mark.nightly(but=('mtp',))
@pytest.mark.parametrize('name', [*_TRAINED, 'tli'])
def test_the_trained_drafter_misses_nothing_of_remembered_rounds(name):
  drafter, states = _rounds(name)
  model, _, params = _scene(name)
  decoder = Decoder(model, drafter.trained, _rule(name))
  propose = jax.jit(lambda state: step.propose(decoder, params, state)[0])
  lengths = []
  for before, state in itertools.pairwise(states[:9]):
    lengths += _kept(before, state)[state.draft.is_remembered].tolist()
    # All rows are asked to draft, whichever drafter was used before.
    own = dataclasses.replace(
      state.draft.trained, over=np.zeros_like(state.done)
    )
    found = propose(dataclasses.replace(state, draft=own))
    lengths_now = np.asarray(state.length)
    fresh = _start(
      model,
      drafter.trained,
      params,
      state.tokens,
      lengths_now,
      rule=_rule(name),
    )
    expected = propose(dataclasses.replace(fresh, limit=state.limit))
    assert np.all(np.asarray(found.tokens) >= 0)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(
      found.signals.log_prob, expected.signals.log_prob, atol=2e-4
    )
  assert not np.any(state.done)
  # Longer than any draft of the trained drafter; and some drafts were wrong.
  assert max(lengths) > drafter.trained.depth > min(lengths)


@pytest.mark.nightly(but=('mtp',))
@pytest.mark.parametrize('name', [*_TRAINED, 'tli'])
def test_greedy_output_is_the_targets_own(name):
  model, _, _ = _scene(name)
  _, states = _rounds(name)
  plain, found = _plain(model), states[-1]
  np.testing.assert_array_equal(found.length, plain.length)
  for row, length in enumerate(plain.length):
    np.testing.assert_array_equal(
      found.tokens[row, :length], plain.tokens[row, :length]
    )
  assert np.all(found.round < plain.round)


def test_rows_of_one_batch_choose_differently():
  _, states = _rounds('chain')
  chosen = [state.draft.is_remembered for state in states[1:9]]
  assert {int(rows.sum()) for rows in chosen} >= {1, 2, 3}


@dataclasses.dataclass(frozen=True)
class _Counting(type(_TARGET)):
  """The same model, but it reports each pass."""

  def apply(self, *args, **kwargs):
    jax.debug.callback(_PASSES.append, 1)
    return super().apply(*args, **kwargs)


_PASSES: list[int] = []


def test_where_all_rows_remember_the_trained_drafter_does_not_run():
  model, chain, params = _scene('chain')
  counting = _Counting(
    **{
      field.name: getattr(_TARGET, field.name)
      for field in dataclasses.fields(_TARGET)
    }
  )
  drafter = drafters.Either(
    remembered=_SUFFIX, trained=dataclasses.replace(chain, model=counting)
  )
  own = _with_store(params, _store(model))
  state = _start(model, drafter, own, _PROMPTS, _LENGTHS)
  ran = set()
  for _ in range(8):
    jax.effects_barrier()
    _PASSES.clear()
    state = _advance(model, drafter, own, state, 1)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert not np.any(state.done)
    ran.add((bool(np.all(state.draft.is_remembered)), bool(_PASSES)))
  assert ran == {(True, False), (False, True)}


def test_nothing_is_learned_of_the_other_drafter():
  model, chain, params = _scene('chain')
  policy = policies.Fastest(costs=(1.0, 1.1, 1.2), patience=1)
  drafter = drafters.Either(
    remembered=_SUFFIX,
    trained=drafters.Adaptive(drafter=chain, policies=(policy,), widths=(0, 1)),
    decay=0.5,
  )
  own = _with_store(params, _store(model))
  state = _start(model, drafter, own, _PROMPTS, _LENGTHS)
  np.testing.assert_allclose(state.draft.kept, drafter.prior_kept)
  of_row = lambda state, row: jax.tree.map(
    lambda x: np.asarray(x[row]).tolist(),
    (state.draft.trained.policies[0].reached, state.draft.kept),
  )
  num_seen = {True: 0, False: 0}
  for _ in range(10):
    before, state = state, _advance(model, drafter, own, state, 1)
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


def test_of_drafts_that_another_filter_cut_nothing_is_learned():
  model, chain, params = _scene('chain')
  fastest = policies.Fastest(costs=(1.0, 1.1, 1.2), patience=1)
  cuts_all = policies.TokenProbability(1.0)
  drafter = drafters.Either(
    remembered=_SUFFIX,
    trained=drafters.Adaptive(
      drafter=chain, policies=(fastest, policies.Fixed(0), cuts_all)
    ),
  )
  own = _with_store(params, _store(model))
  state = _start(model, drafter, own, _PROMPTS, _LENGTHS)
  after = _advance(model, drafter, own, state, 10)
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

  either = functools.partial(drafters.Either, remembered=_SUFFIX)
  assert either(trained=Reader(**_MAKE)).reads_logits
  assert not either(trained=drafters.Chain(**_MAKE)).reads_logits


def test_drawn_and_remembered_tokens_have_one_kind():
  model, chain, params = _scene('chain')
  drafter = drafters.Either(remembered=_SUFFIX, trained=chain, prior_kept=0.3)
  own = _with_store(params, _store(model))
  start = _start(model, drafter, own, _PROMPTS, _LENGTHS, temperature=1.0)
  decoder = Decoder(model, drafter, verify.block)
  draft, state = step.propose(decoder, own, start)
  assert draft.kind is DraftKind.SAMPLED
  assert state.is_remembered.tolist() == [True, False, False]
  tokens, probs = np.asarray(draft.tokens), np.asarray(draft.probs)
  # A point mass at each remembered token.
  np.testing.assert_array_equal(probs[0], np.eye(_V)[tokens[0]])
  # The other rows equal what the trained drafter alone draws, bit for bit.
  alone = dataclasses.replace(start, draft=start.draft.trained)
  decoder = Decoder(model, drafter.trained, verify.block)
  expected, _ = step.propose(decoder, params, alone)
  np.testing.assert_array_equal(tokens[1:, :2], expected.tokens[1:])
  np.testing.assert_array_equal(probs[1:, :2], expected.probs[1:])
  assert 0 < probs[1:, :2].max() < 1
  # Shorter drafts are padded with missing tokens.
  assert np.all(tokens[1:, 2:] == -1) and not probs[1:, 2:].any()


def test_of_two_point_masses_the_draft_is_one():
  model = testing.HashModel(vocab_size=_V)
  ngram = drafters.Ngram(num_draft_tokens=2, min_ngram=1, max_ngram=1)
  remembered = drafters.Suffix(num_draft_tokens=3, min_kept=0.8)
  drafter = drafters.Either(remembered=remembered, trained=ngram)
  store = store_lib.build([[3, 4, 5, 6, 7]] * 8, vocab_size=_V)
  own = {'target': {}, 'drafter': {'remembered': {'store': store}}}
  rows = np.asarray([[1, 3, 8, 9, 3, 4, 5], [1, 8, 2, 9, 2, 0, 8]])
  state = _start(model, drafter, own, rows, np.asarray([7, 7]))
  draft, _ = step.propose(Decoder(model, drafter, verify.chain), own, state)
  assert (draft.kind, draft.probs) == (DraftKind.POINT_MASS, None)
  assert draft.tokens.tolist() == [[6, 7, -1], [2, 9, -1]]


@pytest.mark.nightly
@pytest.mark.parametrize('rule', [verify.chain, verify.block])
def test_the_compiled_loop_follows_the_target(rule):
  """Covers rounds after learning, which the enumeration doesn't reach."""
  model = testing.HashModel(vocab_size=3)
  other = dataclasses.replace(model, noise=0.5)
  store = store_lib.build([[1, 0, 1, 2, 2, 0], [0, 1, 1, 0]], vocab_size=3)
  testing.assert_follows_target(
    _with_store({'target': {}, 'drafter': {}}, store),
    (
      Group((1, 0, 1), Sampling(temperature=1.0)),
      Group((2, 2, 0, 1, 2), Sampling(temperature=0.7, top_k=2)),
    ),
    jax.random.key(3),
    model=model,
    drafter=drafters.Either(
      remembered=drafters.Suffix(
        num_draft_tokens=2, min_kept=0.3, strength=0.5
      ),
      trained=drafters.Chain(model=other, num_draft_tokens=1),
      decay=0.5,
    ),
    verify=rule,
    num_tokens=6,
    num_rows=16384,
  )


_CHAIN = _TRAINED['chain']


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    (
      {'remembered': drafters.Ngram(num_draft_tokens=2)},
      'remembered is Ngram: give a Suffix',
    ),
    (
      {'trained': drafters.Recording(drafter=_CHAIN, model=_TARGET)},
      'trained is Recording, which cannot sit out a round',
    ),
    ({'prior_kept': -1.0}, 'prior_kept is -1.0: give a number of at least 0'),
    ({'decay': 2.0}, 'decay is 2.0: give a number from 0 to 1'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  good = {'remembered': _SUFFIX, 'trained': _CHAIN}
  with pytest.raises(ValueError, match=message):
    drafters.Either(**(good | settings))


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
  drafter = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)
  params = {'target': _target_params(), 'drafter': own}
  with pytest.raises(ValueError, match=message):
    _start(_TARGET, drafter, params, _PROMPTS, _LENGTHS)


@pytest.mark.parametrize('own', [{}, {'drafter': {'trained': {'a': 1}}}])
def test_a_store_is_added_beside_what_is_there(own):
  drafter = drafters.Either(remembered=_SUFFIX, trained=_CHAIN)
  store = _store(_TARGET)
  found = drafter.with_store({'target': {}} | own, 'history', store)
  expected = own.get('drafter', {}) | {'remembered': {'history': store}}
  assert found == {'target': {}, 'drafter': expected}
