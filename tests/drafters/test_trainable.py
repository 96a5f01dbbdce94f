"""Properties of all trainable drafters."""

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
from specsample import verify
from specsample.drafters import vocabulary
from specsample.loop.decoder import Decoder
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads
from specsample.training import step

_V, _K = 8, 3
_TARGET = testing.tiny_llama(vocab_size=_V)
_SOME = {'num_draft_tokens': _K, 'draft_vocab_size': 5}
_DRAFTERS = {
  'medusa': drafters.Medusa(model=_TARGET, **_SOME),
  'hydra': drafters.Hydra(model=_TARGET, num_draft_tokens=_K),
  'hydra++': drafters.Hydra(model=_TARGET, prefix_attention=True, **_SOME),
  'draft_model': drafters.DraftModel(model=_TARGET, layers=(1,), **_SOME),
  'dflash': drafters.DFlash(model=_TARGET, feature_layers=(0, 1), **_SOME),
  'dspark': drafters.DSpark(
    model=_TARGET,
    feature_layers=(0, 1),
    num_draft_tokens=_K,
    rank=4,
    has_feature_norms=True,
  ),
  'eagle': drafters.Eagle(model=_TARGET, num_draft_tokens=_K),
  'eagle3': drafters.Eagle3(
    model=_TARGET, feature_layers=(1, 0, -1), has_feature_norms=True, **_SOME
  ),
  'mtp': drafters.MTP(model=_TARGET, **_SOME),
}
_OBJECTIVES = {
  'draft_model': draft.DraftObjective,
  'dflash': dflash.DFlashObjective,
  'dspark': dflash.DSparkObjective,
  'eagle': eagle.FeatureObjective,
  'eagle3': eagle.FeatureObjective,
  'mtp': eagle.FeatureObjective,
}
_D2T = np.asarray([6, 1, 4, 3, 0])
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _scene(name, dtype='float32'):
  """Returns the target, the drafter and their parameters."""
  drafter = _DRAFTERS[name]
  target_params = _TARGET.init(jax.random.key(0))
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target_params, d2t)
  own = testing.with_noise(own, jax.random.key(2))
  target = dataclasses.replace(_TARGET, dtype=dtype)
  cast = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
  params = jax.tree.map(cast, {'target': target_params, 'drafter': own})
  return target, dataclasses.replace(drafter, model=target), params


@_each
def test_greedy_tokens_are_the_targets_own_in_bfloat16(name):
  target, drafter, params = _scene(name, 'bfloat16')
  new = 16
  output = specsample.generate(
    params,
    _PROMPTS,
    np.full(len(_PROMPTS), _PROMPTS.shape[1]),
    jax.random.key(0),
    model=target,
    drafter=drafter,
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=new,
  )
  assert int(output.rounds.sum()) < output.tokens.size
  tokens = np.concatenate([_PROMPTS, output.tokens], axis=1)
  logits = target.apply(params['target'], tokens, target.init_cache(4, 0))[0]
  logits = np.asarray(logits.logits[:, -new - 1 : -1])
  chosen = np.take_along_axis(logits, output.tokens[..., None], axis=-1)[..., 0]
  # A pass over one token rounds differently from one over many.
  np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=0.05)


@_each
def test_a_step_is_taken_in_bfloat16(name):
  target, drafter, params = _scene(name, 'bfloat16')
  kind = _OBJECTIVES.get(name, heads.HeadsObjective)
  is_trained = {
    'target': jax.tree.map(lambda _: False, params['target']),
    'drafter': drafter.is_trained(),
  }
  optimizer = optax.adam(0.01)
  state, frozen = step.init(params, is_trained, optimizer, target.dtype)
  losses = []
  for _ in range(8):
    state, report = step.train_step(
      state,
      frozen,
      {'tokens': _PROMPTS, 'mask': np.ones(_PROMPTS.shape, bool)},
      objective=kind(drafter=drafter, teacher_weight=1.0),
      optimizer=optimizer,
      dtype=target.dtype,
    )
    losses.append(float(report['loss']))
  assert losses[-1] < losses[0]
  trained = jax.tree.leaves(state.trained)
  assert all(x.dtype == jnp.float32 for x in trained)


@pytest.mark.parametrize('rule', [verify.chain, verify.block, verify.coupled])
@_each
def test_where_no_draft_is_allowed_the_target_goes_on_alone(name, rule):
  target, drafter, params = _scene(name)
  if drafter.draft_vocab_size is None:
    drafter = dataclasses.replace(drafter, draft_vocab_size=5)
    own = drafter.init_params(jax.random.key(1), params['target'], _D2T)
    params = {**params, 'drafter': own}
  bias = np.zeros(_V, np.float32)
  bias[_D2T] = -np.inf
  generate = lambda drafter, verify: specsample.generate(
    params,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(3),
    model=target,
    drafter=drafter,
    verify=verify,
    sampling=specsample.Sampling(temperature=1.0, logit_bias=bias),
    max_new_tokens=12,
  )
  output = generate(drafter, rule)
  assert np.asarray(output.lengths).tolist() == [12] * len(_PROMPTS)
  assert not np.isin(output.tokens, _D2T).any()
  assert np.asarray(output.rounds).tolist() == [12] * len(_PROMPTS)
  if rule is verify.coupled:
    plain = generate(drafters.NoDraft(), rule)
    np.testing.assert_array_equal(output.tokens, plain.tokens)


@pytest.mark.parametrize('name', ['hydra++', 'draft_model', 'dspark', 'eagle3'])
def test_a_row_of_a_running_batch_can_be_refilled(name):
  target, drafter, params = _scene(name)
  decoder = Decoder(target, drafter, verify.chain)
  static = {
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 8,
    'max_length': 96,
  }
  long = (np.arange(70) % _V)[None]
  prefill = lambda prompts, lengths, ids: specsample.prefill(
    decoder,
    params,
    prompts,
    lengths,
    jax.random.key(0),
    request_ids=np.asarray(ids, np.int32),
    **static,
  )
  advance = lambda state, rounds: specsample.advance(
    decoder, params, state, stop=specsample.Stop(), max_rounds=rounds
  )
  tokens = lambda state: (
    specsample.finish(advance(state, 100), max_new_tokens=8).tokens
  )
  state = advance(prefill(_PROMPTS, _LENGTHS, range(4)), 2)
  fresh = prefill(long, np.asarray([70]), [7])
  put = lambda leaf, row: leaf.at[1].set(row[0])
  found = tokens(jax.tree.map(put, state, fresh))
  alone = tokens(prefill(long, np.asarray([70]), [7]))
  others = tokens(prefill(_PROMPTS, _LENGTHS, range(4)))
  np.testing.assert_array_equal(found[1], alone[0])
  for row in (0, 2, 3):
    np.testing.assert_array_equal(found[row], others[row])


def test_logits_of_a_draft_vocabulary_have_the_targets_cap():
  model = dataclasses.replace(_TARGET, logit_softcap=0.5)
  target = model.init(jax.random.key(0))
  drafter = drafters.Medusa(model=model, **_SOME)
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  np.testing.assert_allclose(
    own['vocabulary']['unembedding'], target['unembedding'][:, _D2T], atol=1e-6
  )
  params = {'target': target, 'drafter': own}
  vectors = 2 * jax.random.normal(jax.random.key(2), (2, 3, model.dim))
  expected = model.unembed(target, vectors)[..., _D2T]
  found = drafter.logits(params, vectors)
  assert 0.4 < np.abs(found).max() < 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5)
  # A drafter that was trained elsewhere has no cap, as in its own training.
  published = drafters.Eagle(
    model=model, num_draft_tokens=_K, own_unembedding=True
  )
  assert vocabulary.make(published).softcap is None


@pytest.mark.parametrize('size', [0, 9, 5.0, '5'])
def test_a_vocabulary_of_another_size_is_refused(size):
  with pytest.raises(ValueError, match=f'draft_vocab_size is {size!r}'):
    dataclasses.replace(_DRAFTERS['medusa'], draft_vocab_size=size)


@_each
def test_parameters_are_made_of_the_targets(name):
  drafter = _DRAFTERS[name]
  d2t = None if drafter.draft_vocab_size is None else _D2T
  message = r"target's"
  if d2t is None:
    d2t, message = _D2T, 'd2t names 5 tokens, but draft_vocab_size is None'
  with pytest.raises(ValueError, match=message):
    drafter.init_params(jax.random.key(0), d2t=d2t)
