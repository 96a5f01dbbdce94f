"""Medusa's draft, computed in NumPy."""

import jax
import numpy as np

from specsample import drafters
from specsample import testing
from specsample.drafters.heads import HeadsState
from specsample.types import DraftKind

_V, _K, _D = 12, 2, 16
_TARGET = testing.tiny_llama(vocab_size=_V, dim=_D)
_D2T = [7, 2, 11, 4]


def _silu(x):
  return x / (1 + np.exp(-x))


def _draft(drafter, params, hidden):
  """Returns the drafted argmaxes and the softmaxes they were taken from."""
  state = HeadsState(hidden=hidden, length=np.asarray([3, 3]))
  draft, _ = drafter.propose(
    params,
    lambda probs, position: probs.argmax(axis=-1).astype(np.int32),
    lambda logits, drafted: jax.nn.softmax(logits),
    np.zeros((2, 8), np.int32),
    np.asarray([4, 4]),
    state,
  )
  return jax.device_get(draft)


def _by_hand(head, x):
  block = head['blocks'][0]['linear']
  x = x + _silu(x @ block['kernel'] + block['bias'])
  return x @ head['project']['linear']['kernel']


def _setting(**settings):
  drafter = drafters.Medusa(model=_TARGET, num_draft_tokens=_K, **settings)
  target = _TARGET.init(jax.random.key(0))
  d2t = _D2T if settings else None
  own = drafter.init_params(jax.random.key(1), target, d2t)
  params = {
    'target': target,
    'drafter': testing.with_noise(own, jax.random.key(2)),
  }
  hidden = np.random.default_rng(0).normal(size=(2, _D)).astype(np.float32)
  return drafter, jax.device_get(params), hidden


def test_every_head_reads_the_same_hidden_vector():
  drafter, params, hidden = _setting()
  draft = _draft(drafter, params, hidden)
  assert draft.kind is DraftKind.SAMPLED
  for i, head in params['drafter']['heads'].items():
    logits = _by_hand(head, hidden) @ params['target']['unembedding']
    weights = np.exp(logits)
    np.testing.assert_allclose(
      draft.probs[:, i], weights / weights.sum(axis=1)[:, None], atol=1e-5
    )
    np.testing.assert_array_equal(draft.tokens[:, i], logits.argmax(axis=1))


def test_a_draft_vocabulary_has_all_of_the_probability():
  drafter, params, hidden = _setting(draft_vocab_size=len(_D2T))
  columns = params['drafter']['vocabulary']['unembedding']
  draft = _draft(drafter, params, hidden)
  for i, head in params['drafter']['heads'].items():
    weights = np.exp(_by_hand(head, hidden) @ columns)
    expected = np.zeros((2, _V))
    expected[:, _D2T] = weights / weights.sum(axis=1)[:, None]
    np.testing.assert_allclose(draft.probs[:, i], expected, atol=1e-5)


def test_before_training_the_heads_repeat_the_targets_own_prediction():
  drafter, _, hidden = _setting()
  target = _TARGET.init(jax.random.key(0))
  params = {'target': target, 'drafter': drafter.init_params(jax.random.key(1))}
  draft = _draft(drafter, params, hidden)
  expected = jax.nn.softmax(_TARGET.unembed(target, hidden))
  for i in range(_K):
    np.testing.assert_allclose(draft.probs[:, i], expected, atol=1e-6)


def test_of_the_target_a_draft_vocabulary_takes_the_columns():
  drafter, _, _ = _setting(draft_vocab_size=len(_D2T))
  target = _TARGET.init(jax.random.key(0))
  own = drafter.init_params(jax.random.key(1), target, _D2T)['vocabulary']
  np.testing.assert_array_equal(own['d2t'], _D2T)
  np.testing.assert_allclose(
    own['unembedding'], target['unembedding'][:, np.asarray(_D2T)], rtol=1e-6
  )
