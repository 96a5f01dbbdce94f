"""Medusa and Hydra: properties of all heads on hidden vectors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling

_TARGET = testing.tiny_llama(vocab_size=8)
_K = 3
_D2T = np.asarray([6, 1, 4, 3, 0])
_DRAFTERS = {
  'medusa': drafters.Medusa(
    model=_TARGET, num_draft_tokens=_K, num_layers=2, draft_vocab_size=5
  ),
  'hydra': drafters.Hydra(model=_TARGET, num_draft_tokens=_K),
  'hydra++': drafters.Hydra(
    model=_TARGET,
    num_draft_tokens=_K,
    num_layers=2,
    draft_vocab_size=5,
    prefix_attention=True,
  ),
}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % 8
_LENGTHS = np.asarray([6, 2, 5, 1])
_each = pytest.mark.parametrize('name', _DRAFTERS)


@functools.cache
def _params(name):
  target = _TARGET.init(jax.random.key(0))
  drafter = _DRAFTERS[name]
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  return {
    'target': target,
    'drafter': testing.with_noise(own, jax.random.key(2)),
  }


def _hidden(params, tokens):
  """Returns the target's hidden vectors of whole sequences, from scratch."""
  cache = _TARGET.init_cache(*tokens.shape)
  return _TARGET.apply(params['target'], tokens, cache)[0].hidden


@functools.partial(jax.jit, static_argnums=0)
def _through_prefix(drafter, params, hidden):
  """Applies the prefix layer as the only layer of a Llama fed with `hidden`."""
  size = len(hidden)
  one = dataclasses.replace(_TARGET, num_layers=1, vocab_size=size)
  layers = {0: params['drafter']['prefix']['layer']}
  own = one.init(jax.random.key(0)) | {'layers': layers, 'embedding': hidden.T}
  output, _ = one.apply(
    own, jnp.arange(size)[None], one.init_cache(1, size), features=(0,)
  )
  return output.features[0][0]


@pytest.mark.nightly(but=('hydra++',))
@_each
def test_a_round_leaves_the_true_hidden_vector_of_the_last_kept_token(name):
  params, drafter = _params(name), _DRAFTERS[name]
  prompts = np.tile(_PROMPTS, (8, 1))
  state = specsample.prefill(
    Decoder(_TARGET, drafter, verify.chain),
    params,
    prompts,
    np.tile(_LENGTHS, 8),
    jax.random.key(0),
    sampling=Sampling(temperature=1.0),
    max_new_tokens=24,
  )
  kept = set()
  for _ in range(3):
    state = specsample.advance(
      Decoder(_TARGET, drafter, verify.chain), params, state, max_rounds=1
    )
    kept |= set(np.flatnonzero(np.asarray(state.accepted).any(axis=0)))
    hidden = _hidden(params, state.tokens)
    for row, length in enumerate(np.asarray(state.length)):
      expected = hidden[row]
      if name == 'hydra++':
        expected = _through_prefix(drafter, params, expected)
      # The last token is pending.
      np.testing.assert_allclose(
        state.draft.hidden[row], expected[length - 2], atol=1e-5
      )
      assert state.draft.length[row] == length - 1
  assert kept == set(range(_K + 1))


@pytest.mark.nightly(but=('hydra++',))
@_each
def test_training_sees_what_drafting_sees(name):
  params, drafter = _params(name), _DRAFTERS[name]
  tokens = np.random.default_rng(0).integers(8, size=(2, 9))
  hidden = _hidden(params, tokens)
  vectors = drafter.vectors(params, tokens, hidden)
  trained = jax.nn.softmax(
    drafter.target_logits(params, jnp.stack(vectors, axis=2))
  )
  for t in (0, 3, 5):
    length = np.asarray([t + 2, t + 2])
    state = drafter.init(params, 2, 12)
    output = specsample.types.ModelOutput(logits=None, hidden=hidden)
    state = drafter.observe(params, tokens, length - 1, output, None, state)
    forced = lambda probs, position: jnp.take_along_axis(
      jnp.asarray(tokens), position[:, None] % 9, axis=1
    )[:, 0]
    draft, _ = drafter.propose(
      params,
      forced,
      lambda logits, drafted: jax.nn.softmax(logits),
      jnp.asarray(tokens),
      length,
      state,
    )
    np.testing.assert_allclose(draft.probs, trained[:, t], atol=1e-5)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0: give at least 1'),
    ({'num_layers': 0}, 'num_layers is 0: give an integer'),
    ({'draft_vocab_size': 9}, 'is 9, but the target has 8 tokens'),
    ({'draft_vocab_size': 0}, 'is 0: give an integer of at least 1'),
    (
      {'model': testing.HashModel(vocab_size=8), 'prefix_attention': True},
      'Hydra has layers with the shape of HashModel.*, which is not a '
      'Transformer',
    ),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  sound = {'model': _TARGET, 'num_draft_tokens': _K}
  with pytest.raises(ValueError, match=message):
    drafters.Hydra(**(sound | settings))


@pytest.mark.parametrize(
  ('d2t', 'message'),
  [
    (None, 'd2t is None, but draft_vocab_size is 5'),
    ([0, 1], 'd2t names 2 tokens, but draft_vocab_size is 5'),
    ([0, 1, 2, 3, 8], 'holds id 8, outside the vocabulary of 8'),
    ([0, 1, 2, 3, -1], 'holds id -1'),
    ([0, 1, 2, 3, 3], 'names a token twice'),
    ([0, 1, 2, 3, 4.5], 'd2t is float64'),
  ],
)
def test_a_draft_vocabulary_that_is_none_is_refused(d2t, message):
  with pytest.raises(ValueError, match=message):
    _DRAFTERS['medusa'].init_params(
      jax.random.key(0), _params('medusa')['target'], d2t
    )
