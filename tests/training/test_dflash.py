"""The objectives of block-parallel drafters, against loops over blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample.training import dflash
from specsample.training import step
from tests.training import greedy

_V, _K, _T = 16, 3, 10
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7])
_SOME = {
  'model': _TARGET,
  'num_draft_tokens': _K,
  'feature_layers': (0, 1),
  'num_layers': 1,
  'draft_vocab_size': _D2T.size,
}
# A window of 3 tokens, so that decoding reads a ring.
_DFLASH = drafters.DFlash(
  layer_config=dataclasses.replace(_TARGET, sliding_window=3),
  causal_layers=(0,),
  **_SOME,
)
_DSPARK = drafters.DSpark(rank=4, **_SOME)
_DFLASH2 = drafters.DFlash2(
  conv_group_size=4,
  selector_rank=4,
  selector_top_k=3,
  final_logit_softcapping=3.0,
  **_SOME,
)
_RNG = np.random.default_rng(0)
_BATCH = {
  'tokens': _RNG.integers(_V, size=(4, _T)),
  'mask': _RNG.random((4, _T)) < 0.7,
}
_OBJECTIVES = {
  'dflash': dflash.DFlashObjective(
    drafter=_DFLASH,
    token_weight=2.0,
    teacher_weight=3.0,
    gamma=1.5,
    num_blocks=3,
  ),
  'dspark': dflash.DSparkObjective(
    drafter=_DSPARK,
    token_weight=2.0,
    teacher_weight=3.0,
    confidence_weight=4.0,
    num_blocks=3,
    recompute=True,
  ),
  'dflash2': dflash.DFlash2Objective(
    drafter=_DFLASH2,
    token_weight=2.0,
    teacher_weight=3.0,
    selector_weight=4.0,
    num_blocks=3,
  ),
}

# All slots depend on those before, so that they are computed one by one.
_OF_RNN = {
  'rnn': dataclasses.replace(
    _OBJECTIVES['dspark'], drafter=dataclasses.replace(_DSPARK, head='rnn')
  )
}


@functools.cache
def _params(drafter):
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(4), 0.3)
  # The draft vocabulary's columns are the target's.
  return {
    'target': target,
    'drafter': noisy | {'vocabulary': own['vocabulary']},
  }


def _log_softmax(logits):
  wide = np.asarray(logits, np.float64)
  return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _of_target(drafter, params, tokens):
  empty = _TARGET.init_cache(len(tokens), 0)
  layers = drafter.feature_layers
  return _TARGET.apply(params['target'], tokens, empty, features=layers)[0]


@functools.partial(jax.jit, static_argnums=0)
def _draft(drafter, params, tokens, length, forced):
  """Returns probabilities [K, V] and vectors after a row, as in decoding."""
  output = _of_target(drafter, params, tokens)
  state = drafter.init(params, 1, tokens.shape[1])
  state = drafter.observe(params, tokens, length - 1, output, None, state)
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  draw = lambda probs, position: forced[position]
  draft, _ = drafter.propose(params, draw, warp, tokens, length, state)
  pending = tokens[:, length[0] - 1][:, None]
  vectors = drafter.vectors(params, pending, length[:, None] - 1, state)
  return draft.probs[0], vectors[0, 0]


def _by_hand(drafter, params, batch, blocks):
  """Computes means over the drafts of blocks [(row, place of pending token)].

  Returns the weighted means of cross-entropy, KL, total variation and the
  cross-entropy of the confidence or the selection, and [K] the share of correct
  drafts.
  """
  tokens, mask = batch['tokens'], batch['mask']
  hidden = _of_target(drafter, params, tokens).hidden
  teacher = _log_softmax(_TARGET.unembed(params['target'], hidden)[..., _D2T])
  sums, weights = np.zeros(4), np.zeros(4)
  correct: list[list[bool]] = [[] for _ in range(_K)]
  for row, place in blocks:
    padded = np.pad(tokens[row], (0, _K + 1))
    probs, vectors = _draft(
      drafter, params, padded[None, : _T + 1], np.asarray([place + 1]), padded
    )
    for i in range(_K):
      if place + 1 + i >= _T or not mask[row, place + 1 + i]:
        continue
      weight = np.exp(-i / _gamma(drafter))
      came = padded[place + 1 + i]
      draft = np.asarray(probs[i], np.float64)[_D2T]
      target = np.exp(teacher[row, place + i])
      correct[i].append(_D2T[draft.argmax()] == came)
      selected = probs[i, came]
      if drafter == _DFLASH2:
        logits = vectors[i] @ params['drafter']['vocabulary']['unembedding']
        draft = np.exp(_log_softmax(3 * np.tanh(logits / 3)))
      variation = np.abs(draft - target).sum() / 2
      values = [0, (target * np.log(target / draft)).sum(), variation, 0]
      counts = np.full(4, weight)
      if came in _D2T:
        values[0] = -np.log(draft[came == _D2T][0])
      else:
        counts[0] = 0
      if drafter == _DFLASH2:
        is_candidate = selected > 0
        counts[3] *= is_candidate
        values[3] = -np.log(selected) if is_candidate else 0
      elif drafter != _DFLASH:
        before = padded[place + i : place + i + 1]
        score = drafter.confidence_logits(params, vectors[i : i + 1], before)
        trust = 1 / (1 + np.exp(-np.float64(score[0])))
        values[3] = -(1 - variation) * np.log(trust)
        values[3] -= variation * np.log(1 - trust)
      sums += counts * values
      weights += counts
  return sums / weights, np.asarray([np.mean(found) for found in correct])


def _gamma(drafter):
  name = 'dflash' if drafter == _DFLASH else 'dspark'
  return _OBJECTIVES[name].gamma


@pytest.mark.parametrize('name', [*_OBJECTIVES, *_OF_RNN])
def test_drafts_of_some_blocks_are_learned(name):
  objective = (_OBJECTIVES | _OF_RNN)[name]
  params = _params(objective.drafter)
  loss, report = jax.jit(objective)(params, _BATCH)
  start, exists = dflash.starts(_BATCH, 3)
  assert exists.all()
  blocks = [(b, int(start[b, j])) for b, j in np.ndindex(start.shape)]
  means, correct = _by_hand(objective.drafter, params, _BATCH, blocks)
  entropy, divergence, variation, of_head = means
  expected = 2 * entropy + 4 * of_head
  expected += 3 * (divergence if 'dflash' in name else variation)
  np.testing.assert_allclose(loss, expected, rtol=1e-4)
  np.testing.assert_allclose(report['correct'], correct, atol=1e-6)


@pytest.mark.parametrize('name', _OBJECTIVES)
def test_matches_are_those_of_every_place(name):
  objective = _OBJECTIVES[name]
  params = _params(objective.drafter)
  tokens, mask = _BATCH['tokens'], _BATCH['mask']
  expected = np.zeros((_K, *tokens.shape), bool)
  for b, t in np.ndindex(tokens.shape):
    padded = np.pad(tokens[b], (0, _K + 1))
    probs, _ = _draft(
      objective.drafter,
      params,
      padded[None, : _T + 1],
      np.asarray([t + 1]),
      padded,
    )
    for i in range(_K):
      if t + 1 + i < _T and mask[b, t + 1 + i]:
        expected[i, b, t] = probs[i].argmax() == tokens[b, t + 1 + i]
  assert expected.any()
  # Three places at a time, and the last alone.
  found = jax.jit(objective.matches)(params, _BATCH)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_selection_is_learned_where_the_token_is_a_candidate():
  params = _params(_DFLASH2)
  own = params['drafter']
  selector = own['selector'] | {'successor': 0 * own['selector']['successor']}
  params = params | {'drafter': own | {'selector': selector}}
  # One draft more is learned than the two whose tokens are candidates; a fourth
  # has a token that is never drafted, and a fifth is not learned.
  logits = np.log([[4.0, 3, 2, 1, 1, 1]] * 5, dtype=np.float32)
  drafted = dflash.Drafted(
    vectors=np.ones((1, 1, 5, _TARGET.dim), np.float32),
    before=np.asarray([[[3, 1, 4, 1, 5]]]),
    logits=logits[None, None],
    ids=np.asarray([[[0, 5, 2, 1, 1]]]),
    is_drafted=np.asarray([[[True, True, True, False, True]]]),
    hidden=np.ones((1, 1, 5, _TARGET.dim), np.float32),
  )
  learned = np.asarray([[[True, True, True, True, False]]])
  objective = dataclasses.replace(
    _OBJECTIVES['dflash2'], token_weight=0.0, teacher_weight=0.0
  )
  found = objective.loss(params, drafted, learned)
  values = -np.log([4 / 9, 2 / 9])
  weights = np.exp([0, -2 / 4])
  expected = 4 * (weights * values).sum() / weights.sum()
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  # Weights are of all that is learned: they count the drafts up to each.
  counted = dataclasses.replace(
    objective,
    slot_weights=lambda log_probs, learned: jnp.cumsum(learned, axis=0),
  )
  found = counted.loss(params, drafted, learned)
  np.testing.assert_allclose(found, 4 * (values @ [1, 3]) / 2, rtol=1e-5)


def test_blocks_begin_evenly_where_there_is_something_to_learn():
  tokens = _RNG.integers(_V, size=(64, 40))
  mask = np.arange(40) >= 10
  mask = np.tile(mask, (64, 1))
  mask[1] = np.arange(40) == 7
  mask[2] = False
  starts = jax.jit(dflash.starts, static_argnums=1)
  find = lambda tokens, mask, n: starts({'tokens': tokens, 'mask': mask}, n)
  start, exists = jax.device_get(find(tokens, mask, 5))
  assert exists.sum(axis=1).tolist() == [5, 1, 0] + [5] * 61
  assert start[1, 0] == 6
  usable = np.delete(np.arange(64), [1, 2])
  assert start[usable].min() == 9
  assert start[usable].max() == 38
  assert set(np.diff(start[usable], axis=1).ravel()) == {6}
  # In another batch, other places are taken.
  others, _ = find(tokens[:32], mask[:32], 5)
  assert (start[3:32] != others[3:]).any(axis=1).mean() > 0.5
  again, _ = find(tokens, mask, 5)
  np.testing.assert_array_equal(start, again)


def test_blocks_begin_at_the_same_places_with_64_bits():
  tokens = _RNG.integers(2**17, size=(16, 40))
  mask = np.tile(np.arange(40) >= 10, (16, 1))
  expected = jax.device_get(dflash.starts({'tokens': tokens, 'mask': mask}, 5))
  with jax.enable_x64(True):
    found = jax.device_get(dflash.starts({'tokens': tokens, 'mask': mask}, 5))
  np.testing.assert_array_equal(found, expected)


def test_features_may_be_found_before():
  objective = dataclasses.replace(_OBJECTIVES['dflash'], num_blocks=2)
  params = _params(_DFLASH)
  output = _of_target(_DFLASH, params, _BATCH['tokens'])
  known = {
    'hidden': output.hidden,
    'features': jnp.concatenate(output.features, axis=-1),
  }
  compare = jax.jit(objective)
  found, _ = compare(params, _BATCH | known)
  np.testing.assert_allclose(found, compare(params, _BATCH)[0], rtol=1e-5)
  for name, values in known.items():
    others, _ = compare(params, _BATCH | known | {name: values[::-1]})
    assert abs(others - found) > 1e-3


@pytest.mark.parametrize('name', _OBJECTIVES)
def test_what_is_masked_out_has_no_gradient(name):
  objective = _OBJECTIVES[name]
  params = _params(objective.drafter)
  nothing = _BATCH | {'mask': np.zeros((4, _T), bool)}
  gradient = jax.jit(
    jax.grad(
      lambda own: objective(params | {'drafter': own}, nothing)[0],
      allow_int=True,
    )
  )(params['drafter'])
  del gradient['vocabulary']
  for leaf in jax.tree.leaves(gradient):
    np.testing.assert_array_equal(leaf, 0)


@pytest.mark.slow
def test_drafts_do_not_change_for_the_confidence():
  alone = dataclasses.replace(
    _OBJECTIVES['dspark'], token_weight=0.0, teacher_weight=0.0
  )
  params = _params(_DSPARK)
  gradient = jax.jit(
    jax.grad(
      lambda own: alone(params | {'drafter': own}, _BATCH)[0], allow_int=True
    )
  )(params['drafter'])
  del gradient['vocabulary']
  head = gradient.pop('confidence')
  assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(head))
  for leaf in jax.tree.leaves(gradient):
    np.testing.assert_array_equal(leaf, 0)


@pytest.mark.nightly(only=('dspark',))
@pytest.mark.parametrize('name', _OBJECTIVES)
def test_losses_fall_and_drafts_are_kept(name):
  target = _params(_DFLASH)['target']
  settings = {**_SOME, 'draft_vocab_size': None}
  kinds = {
    'dflash': drafters.DFlash,
    'dspark': drafters.DSpark,
    'dflash2': functools.partial(drafters.DFlash2, selector_top_k=4),
  }
  drafter = kinds[name](**settings)
  made_for = {
    'dflash': dflash.DFlashObjective,
    'dspark': dflash.DSparkObjective,
    'dflash2': dflash.DFlash2Objective,
  }
  objective = made_for[name](drafter=drafter)
  params = {
    'target': target,
    'drafter': drafter.init_params(jax.random.key(1), target),
  }
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  optimizer = optax.adam(3e-3)
  text = greedy.text(_TARGET, target, 64, 24)
  first, last = greedy.train(
    params, is_trained, text, objective=objective, optimizer=optimizer
  )
  assert last['loss'] < 0.8 * first['loss']
  assert last['kept'].sum() > first['kept'].sum() + 0.3


@pytest.mark.slow
def test_a_mask_that_is_a_token_stays_its_embedding(tmp_path):
  drafter = dataclasses.replace(_DSPARK, mask_token_id=5)
  target = _params(_DSPARK)['target']
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  expected = np.asarray(target['embedding'])[:, 5]
  np.testing.assert_array_equal(own['mask'], expected)
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  assert is_trained['drafter']['mask'] is False
  optimizer = optax.adam(1e-2)
  objective = dataclasses.replace(_OBJECTIVES['dspark'], drafter=drafter)
  state, frozen = step.init(
    {'target': target, 'drafter': own}, is_trained, optimizer
  )
  state, report = step.train_step(
    state, frozen, _BATCH, objective=objective, optimizer=optimizer
  )
  assert report['is_finite']
  learned = step.join(state.trained, frozen)['drafter']
  assert (learned['fuse']['kernel'] != own['fuse']['kernel']).any()
  np.testing.assert_array_equal(learned['mask'], expected)
  loaded = specsample.Loaded(_TARGET, target, None)
  specsample.save_drafter(
    tmp_path / 'drafter',
    drafter,
    learned,
    target=loaded.fingerprint,
    card={},
  )
  found = specsample.load_drafter(tmp_path / 'drafter', target=loaded)
  assert found.drafter == drafter
  rounded = jnp.asarray(expected, jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(found.params['mask'], rounded)


@pytest.mark.parametrize('mask_id', [-1, _V, 2.0])
def test_a_mask_that_is_no_token_is_refused(mask_id):
  with pytest.raises(ValueError, match=r'mask_token_id is .* tokens 0 to 15'):
    dataclasses.replace(_DSPARK, mask_token_id=mask_id)


@pytest.mark.parametrize('setting', ['num_blocks', 'gamma'])
def test_settings_that_learn_nothing_are_refused(setting):
  with pytest.raises(ValueError, match=rf'Objective\.{setting} is 0: give a'):
    dataclasses.replace(_OBJECTIVES['dflash'], **{setting: 0})


@pytest.mark.slow
def test_parts_of_a_batch_have_the_gradient_of_the_whole():
  drafter = dataclasses.replace(_DFLASH, draft_vocab_size=None)
  # All places are taken, so both have the same blocks.
  objective = dflash.DFlashObjective(drafter=drafter, num_blocks=_T)
  target = _TARGET.init(jax.random.key(3))
  own = drafter.init_params(jax.random.key(1), target)
  own = testing.with_noise(own, jax.random.key(4), 0.3)
  params = {'target': target, 'drafter': own}
  is_trained = {
    'target': jax.tree.map(lambda _: False, target),
    'drafter': drafter.is_trained(),
  }
  mask = np.arange(_T) >= np.asarray([1, 9, 2, 8])[:, None]
  sgd = optax.sgd(0.1)
  take = lambda num_parts: step.train_step(
    *step.init(params, is_trained, sgd),
    _BATCH | {'mask': mask},
    objective=objective,
    optimizer=sgd,
    num_parts=num_parts,
    num_learned=objective.num_learned,
  )[1]
  whole = take(1)
  for num_parts in (2, 4):
    parts = take(num_parts)
    for name in ('loss', 'gradient_norm'):
      np.testing.assert_allclose(parts[name], whole[name], rtol=1e-4)
