"""A draft model: a few of its target's layers, and then trained weights."""

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
from specsample.drafters import draft_model
from specsample.sampling import Sampling
from specsample.types import DraftKind

_V, _K, _LAYERS = 12, 3, (0, 2)
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_WHOLE = drafters.DraftModel(model=_TARGET, num_draft_tokens=_K, layers=_LAYERS)
_CUT = dataclasses.replace(_WHOLE, draft_vocab_size=_D2T.size)
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % _V
_LENGTHS = np.asarray([6, 2, 5, 1])


@functools.cache
def _target_params():
  # Larger than at initialisation, where leaving a layer out hardly matters.
  return jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))


@functools.cache
def _params(drafter, scale=0.0):
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), _target_params(), d2t)
  own = testing.with_noise(own, jax.random.key(2), scale)
  return {'target': _target_params(), 'drafter': own}


def _generate(params, drafter, **changes):
  settings = {
    'model': _TARGET,
    'drafter': drafter,
    'verify': verify.block,
    'sampling': Sampling(temperature=1.0, top_k=8),
    'max_new_tokens': 24,
  }
  return specsample.generate(
    params, _PROMPTS, _LENGTHS, jax.random.key(3), **(settings | changes)
  )


def test_untrained_it_drafts_as_its_targets_layers():
  skip = drafters.Skip(model=_TARGET, layers=_LAYERS, num_draft_tokens=_K)
  found = _generate(_params(_WHOLE), _WHOLE)
  expected = _generate({'target': _target_params()}, skip)
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_array_equal(found.accepted, expected.accepted)
  np.testing.assert_array_equal(found.emit_round, expected.emit_round)


@jax.jit
def _by_hand(params, tokens):
  """Returns the probabilities [T, V] after each token of a sequence."""
  own, size = params['drafter'], tokens.size
  # A Llama whose input vocabulary is the sequence; the logits come from the
  # drafter's own vocabulary.
  two = dataclasses.replace(_TARGET, num_layers=2, vocab_size=size)
  decoder = {
    'embedding': params['target']['embedding'][:, tokens],
    'unembedding': jnp.zeros((_TARGET.dim, size)),
    'layers': own['layers'],
    'norm': own['norm'],
  }
  output, _ = two.apply(
    decoder, jnp.arange(size)[None], two.init_cache(1, size)
  )
  logits = output.hidden[0] @ own['vocabulary']['unembedding']
  return jnp.zeros((size, _V)).at[:, _D2T].set(jax.nn.softmax(logits))


def _propose(drafter, params, tokens, length, draw):
  """Returns the draft after one row's first `length` tokens, in one prefill."""
  warp = lambda logits, drafted: jax.nn.softmax(logits)

  @jax.jit
  def propose(params, tokens, length):
    state = drafter.init(params, 1, tokens.shape[1])
    state = drafter.observe(params, tokens, length - 1, None, None, state)
    return drafter.propose(params, draw, warp, tokens, length, state)[0]

  padded = np.zeros((1, 12), np.int32)
  padded[0, : len(tokens)] = tokens
  return propose(params, padded, np.asarray([length]))


@pytest.mark.parametrize('sequence', [[5], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_drafts_are_drawn_from_its_own_layers_and_vocabulary(sequence):
  params = _params(_CUT, 0.1)
  # Draws the second most likely token, so that an argmax would be noticed.
  second = lambda probs, position: probs.argsort(axis=-1)[:, -2].astype('int32')
  draft = _propose(_CUT, params, sequence, len(sequence), second)
  assert draft.kind is DraftKind.SAMPLED
  text = np.asarray([*sequence, *draft.tokens[0]])
  expected = _by_hand(params, text)[len(sequence) - 1 : -1]
  np.testing.assert_allclose(draft.probs[0], expected, atol=1e-5)
  np.testing.assert_array_equal(draft.tokens[0], expected.argsort()[:, -2])
  others = np.setdiff1d(np.arange(_V), _D2T)
  np.testing.assert_array_equal(draft.probs[0][:, others], 0)


def test_training_sees_what_drafting_sees():
  params = _params(_CUT, 0.1)
  tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]

  @jax.jit
  def whole(params):
    vectors = _CUT.vectors(params, jnp.asarray([tokens]))
    return jax.nn.softmax(_CUT.target_logits(params, vectors))[0]

  trained = whole(params)
  forced = lambda probs, position: jnp.asarray(tokens)[position]
  for length in (1, 7):
    draft = _propose(_CUT, params, tokens[:length], length, forced)
    # The pending token's logits give the first draft token.
    expected = trained[length - 1 : length - 1 + _K]
    np.testing.assert_allclose(draft.probs[0], expected, atol=1e-5)


def test_it_is_a_model_by_itself():
  params = _params(_CUT, 0.1)
  output = _generate(
    {'target': params}, drafters.NoDraft(), model=_CUT.draft_model
  )
  assert set(np.unique(output.tokens)) <= set(_D2T)


def test_only_what_it_does_not_share_is_stored():
  own = _params(_CUT)['drafter']
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(_CUT.abstract_params()) == shapes(own)
  assert set(own) == {'layers', 'norm', 'vocabulary'}
  assert set(_params(_WHOLE)['drafter']) == {'layers', 'norm'}
  trained = _CUT.is_trained()
  assert not any(jax.tree.leaves(trained.pop('vocabulary')))
  assert all(jax.tree.leaves(trained))


def test_it_begins_in_float32_whatever_the_target_is_in():
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _target_params())
  own = _CUT.init_params(jax.random.key(0), half, _D2T)
  floats = [x for x in jax.tree.leaves(own) if x.dtype != jnp.int32]
  assert {x.dtype for x in floats} == {np.dtype('float32')}
  expected = half['layers'][2]['mlp']['up']['kernel'].astype(jnp.float32)
  np.testing.assert_array_equal(
    own['layers'][1]['mlp']['up']['kernel'], expected
  )


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'layers': ()}, r'layers are \(\), but the target has layers 0 to 2'),
    ({'layers': (0, 3)}, 'layers 0 to 2'),
    ({'layers': (-1,)}, 'layers 0 to 2'),
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0'),
    ({'draft_vocab_size': 13}, 'is 13, but the target has 12 tokens'),
    (
      {'model': testing.HashModel(vocab_size=8)},
      'shape of HashModel.*, which is not a Transformer',
    ),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_WHOLE, **settings)


def test_it_is_equal_by_value():
  same = drafters.DraftModel(
    model=_TARGET, num_draft_tokens=_K, layers=list(_LAYERS)
  )
  assert same == _WHOLE
  assert hash(same.draft_model) == hash(draft_model.Decoder(_WHOLE))
