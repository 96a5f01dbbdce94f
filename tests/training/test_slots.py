"""Weights of drafts, by hand and in each objective that has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample.training import dflash
from specsample.training import eagle
from specsample.training import heads
from specsample.training import losses
from specsample.training import slots

_V, _K, _T = 16, 3, 10
_TARGET = testing.tiny_llama(vocab_size=_V)
_D2T = np.asarray([9, 3, 4, 0, 12, 7])
_SOME = {'model': _TARGET, 'num_draft_tokens': _K, 'draft_vocab_size': 6}
_RNG = np.random.default_rng(0)
_BATCH = {
  'tokens': _RNG.integers(_V, size=(3, _T)),
  'mask': _RNG.random((3, _T)) < 0.7,
}
_FROM_TOKENS = {'token_weight': 1.0, 'teacher_weight': 0.0}
_OBJECTIVES = {
  'heads': heads.HeadsObjective(drafter=drafters.Medusa(**_SOME)),
  'features': eagle.FeatureObjective(
    drafter=drafters.MTP(**_SOME), num_steps=_K, **_FROM_TOKENS
  ),
  'dflash': dflash.DFlashObjective(
    drafter=drafters.DFlash(feature_layers=(0, 1), **_SOME), num_blocks=4
  ),
}


def _with(objective, slot_weights):
  settings = {**vars(objective), 'slot_weights': slot_weights}
  return type(objective)(**settings)


def _params(drafter):
  target = jax.tree.map(lambda x: 2 * x, _TARGET.init(jax.random.key(3)))
  own = drafter.init_params(jax.random.key(1), target, _D2T)
  noisy = testing.with_noise(own, jax.random.key(4), 0.3)
  kept = {'vocabulary': own['vocabulary']}
  return {'target': target, 'drafter': noisy | kept}


def test_the_weights_of_d_pace_by_hand():
  log_probs = jnp.log(jnp.asarray([0.8, 0.5, 0.9]))
  found = slots.d_pace(log_probs, jnp.ones(3, bool))
  np.testing.assert_allclose(found, [2.21625, 1.31625, 0.64125], rtol=1e-6)
  # A draft that is not learned neither counts nor stops those after it.
  found = slots.d_pace(log_probs, jnp.asarray([True, False, True]))
  np.testing.assert_allclose(found, [0.9 + 0.855, 0.855, 0.855], rtol=1e-6)
  # A token that is never drafted has the probability 0.
  found = slots.d_pace(jnp.asarray([-jnp.inf, 0.0]), jnp.ones(2, bool))
  np.testing.assert_allclose(found, [1.0, 0.5], rtol=1e-6)


def test_they_are_the_gradient_of_what_is_kept_by_log_probabilities():
  log_probs = jnp.log(jnp.asarray([0.8, 0.5, 0.9]))
  expected = jax.grad(lambda x: jnp.sum(jnp.exp(jnp.cumsum(x))))(log_probs)
  found = slots.d_pace(log_probs, jnp.ones(3, bool), smoothing=0.0)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_they_have_no_gradient():
  weigh = lambda x: jnp.sum(slots.d_pace(x, jnp.ones(3, bool)))
  np.testing.assert_array_equal(jax.grad(weigh)(-jnp.ones(3)), 0)


def test_a_smoothing_out_of_range_is_refused():
  with pytest.raises(ValueError, match=r'smoothing is 1.5: give a number from'):
    slots.d_pace(jnp.zeros(2), jnp.ones(2, bool), 1.5)


@pytest.mark.nightly(but=('heads',))
@pytest.mark.parametrize('name', ['heads', 'features'])
def test_weights_may_be_given_for_those_that_decay(name):
  objective = _OBJECTIVES[name]
  params = _params(objective.drafter)

  def same(log_probs, learned):
    assert log_probs.shape == learned.shape == (_K, 3, _T)
    decay = objective.decay ** jnp.arange(_K)
    return jnp.broadcast_to(decay[:, None, None], learned.shape)

  expected, _ = jax.jit(objective)(params, _BATCH)
  found, _ = jax.jit(_with(objective, same))(params, _BATCH)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.nightly(but=('heads',))
@pytest.mark.parametrize('name', ['heads', 'features'])
def test_each_token_weighs_what_d_pace_says(name):
  objective = _OBJECTIVES[name]
  params = _params(objective.drafter)
  seen = []

  def watch(log_probs, learned):
    seen.extend([log_probs, learned])
    return slots.d_pace(log_probs, learned)

  found, _ = _with(objective, watch)(params, _BATCH)
  log_probs, learned = (np.asarray(x) for x in seen)
  tokens, mask = _BATCH['tokens'], _BATCH['mask']
  expected = 0.0
  for b, t in np.ndindex(tokens.shape):
    weights = np.asarray(
      slots.d_pace(jnp.asarray(log_probs[:, b, t]), learned[:, b, t])
    )
    for i in range(_K):
      place = t + 2 + i
      is_learned = place < _T and mask[b, place]
      assert learned[i, b, t] == is_learned
      if not is_learned or tokens[b, place] not in _D2T:
        continue
      assert -40 < log_probs[i, b, t] < 0
      shifted = mask[:, 2 + i :] & np.isin(tokens[:, 2 + i :], _D2T)
      expected -= weights[i] * log_probs[i, b, t] / shifted.sum()
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_block_weighs_what_d_pace_says():
  objective = _with(_OBJECTIVES['dflash'], slots.d_pace)
  logits = _RNG.normal(size=(1, 2, _K, 6)).astype(np.float32)
  drafted = dflash.Drafted(
    vectors=None,
    before=None,
    logits=jnp.asarray(logits),
    ids=jnp.asarray([[[0, 5, 2], [1, 0, 3]]]),
    is_drafted=jnp.asarray([[[True, True, True], [True, False, True]]]),
    hidden=None,
  )
  learned = jnp.asarray([[[True, True, True], [True, True, False]]])
  found = objective.loss({}, drafted, learned)
  entropy = np.asarray(losses.cross_entropy(logits, drafted.ids))[0]
  first = slots.d_pace(-entropy[0], jnp.ones(3, bool))
  second = slots.d_pace(
    jnp.asarray([-entropy[1, 0], -jnp.inf]), jnp.ones(2, bool)
  )
  expected = (first * entropy[0]).sum() + second[0] * entropy[1, 0]
  np.testing.assert_allclose(found, expected / 4, rtol=1e-5)
