"""EAGLE and multi-token prediction: properties of all feature drafters."""

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
from specsample.training import unrolled
from specsample.types import DraftKind
from tests.drafters import features_by_hand

_V, _K = 12, 3
_TARGET = testing.tiny_llama(vocab_size=_V, num_layers=3)
_D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_SOME = {'num_draft_tokens': _K, 'draft_vocab_size': _D2T.size}
_DRAFTERS = {
  'eagle': drafters.Eagle(model=_TARGET, **_SOME),
  'eagle3': drafters.Eagle3(
    model=_TARGET, num_draft_tokens=_K, feature_layers=(-1, 1, 0)
  ),
  'p-eagle': drafters.PEagle(
    model=_TARGET,
    feature_layers=(-1, 1, 0),
    mask_token_id=5,
    num_layers=2,
    **_SOME,
  ),
  'mtp': drafters.MTP(model=_TARGET, **_SOME),
  'mtp of 2': drafters.MTP(model=_TARGET, num_modules=2, **_SOME),
  # More modules than draft tokens, so one is never used.
  'mtp of 4': drafters.MTP(model=_TARGET, num_modules=4, **_SOME),
}
_TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
_each = pytest.mark.parametrize('name', _DRAFTERS)
# Drafters that continue from their own outputs. How P-EAGLE drafts is in
# tests/loading/published/test_p_eagle.py.
_unrolled = pytest.mark.parametrize(
  'name', [name for name in _DRAFTERS if name != 'p-eagle']
)
# For multi-token prediction, several modules stand for a single one too.
_few = pytest.mark.parametrize(
  'name', ['eagle', 'eagle3', 'p-eagle', 'mtp of 2']
)


@functools.cache
def _params(name, dtype='float32'):
  drafter = _DRAFTERS[name]
  # Larger than at initialisation, where one layer hardly matters.
  target = jax.tree.map(lambda x: 1.6 * x, _TARGET.init(jax.random.key(0)))
  d2t = None if drafter.draft_vocab_size is None else _D2T
  own = drafter.init_params(jax.random.key(1), target, d2t)
  own = testing.with_noise(own, jax.random.key(2))
  cast = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
  return jax.tree.map(cast, {'target': target, 'drafter': own})


def _as(drafter, **changes):
  model = dataclasses.replace(drafter.model, **changes)
  return dataclasses.replace(drafter, model=model)


@functools.partial(jax.jit, static_argnames='drafter')
def _read(params, tokens, *, drafter):
  """Returns the target's output for whole sequences."""
  model = drafter.model
  empty = model.init_cache(tokens.shape[0], 0)
  return model.apply(params['target'], tokens, empty, drafter.feature_layers)[0]


@functools.partial(jax.jit, static_argnames=('drafter', 'draw'))
def _propose(params, tokens, length, *, drafter, draw):
  """Returns the draft after the first length [B] tokens, in one prefill."""
  output = _read(params, tokens, drafter=drafter)
  state = drafter.init(params, *tokens.shape)
  state = drafter.observe(params, tokens, length - 1, output, None, state)
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  return drafter.propose(params, draw, warp, tokens, length, state)


def _second(probs, position):
  """Draws the second most likely token, so that an argmax would be noticed."""
  del position
  return jnp.argsort(probs, axis=-1)[:, -2].astype(jnp.int32)


def _forced(probs, position):
  del probs
  return jnp.asarray(_TEXT)[position]


def _probs(params, drafter, vectors):
  """Returns the probabilities of all tokens for vectors [n, D]."""
  own = params['drafter']
  if drafter.draft_vocab_size is None:
    logits = _TARGET.unembed(params['target'], jnp.asarray(vectors))
    return jax.nn.softmax(logits)
  logits = vectors @ own['vocabulary']['unembedding']
  nothing = jnp.zeros((len(vectors), _V))
  return nothing.at[:, _D2T].set(jax.nn.softmax(logits))


@pytest.mark.nightly(but=('eagle-None', 'eagle3-3', 'mtp of 4-3'))
@pytest.mark.parametrize('window', [None, 3])
@_unrolled
def test_drafts_are_those_worked_out_by_hand(name, window):
  params, drafter = _params(name), _as(_DRAFTERS[name], sliding_window=window)
  lengths = np.asarray([2, 8])
  tokens = np.tile(_TEXT, (2, 1))
  draft, _ = _propose(params, tokens, lengths, drafter=drafter, draw=_second)
  assert draft.kind is DraftKind.SAMPLED
  output = _read(params, tokens[:1], drafter=drafter)
  for length, drafted, probs in zip(
    lengths, np.asarray(draft.tokens), draft.probs, strict=True
  ):
    text = np.concatenate([_TEXT[:length], drafted])
    vectors = features_by_hand.vectors(
      params, drafter, output, text, length, _K
    )
    expected = np.asarray(_probs(params, drafter, vectors))
    np.testing.assert_allclose(probs, expected, atol=1e-5)
    np.testing.assert_array_equal(drafted, expected.argsort(axis=-1)[:, -2])


@pytest.mark.nightly(but=('eagle3-None', 'mtp of 4-3'))
@pytest.mark.parametrize('window', [None, 3])
@_unrolled
def test_training_sees_what_drafting_sees(name, window):
  params, drafter = _params(name), _as(_DRAFTERS[name], sliding_window=window)
  text = np.asarray([_TEXT])
  output = _read(params, text, drafter=drafter)
  features = drafter.features(params, output.hidden, output.features)
  outputs = unrolled.outputs(drafter, params, {'tokens': text}, features, _K)
  vectors = jnp.stack(
    [drafter.vectors(params, x, i)[0] for i, x in enumerate(outputs)]
  )
  trained = jax.nn.softmax(drafter.target_logits(params, vectors))
  # One row for every length; the last tokens are drafts.
  lengths = np.arange(2, text.size - _K + 1)
  draft, _ = _propose(
    params,
    np.tile(text, (lengths.size, 1)),
    lengths,
    drafter=drafter,
    draw=_forced,
  )
  expected = jnp.swapaxes(trained[:, lengths - 2], 0, 1)
  np.testing.assert_allclose(draft.probs, expected, atol=1e-5)


def _cache_error(drafter, name, num_rounds):
  """Returns the cache's error against a fresh one, in standard deviations."""
  params = _params(name, drafter.model.dtype)
  # Row lengths: above a prefill chunk of 64, equal to it, one above, and short.
  prompts = np.random.default_rng(0).integers(_V, size=(5, 70))
  decoder = Decoder(drafter.model, drafter, verify.chain)
  state = specsample.prefill(
    decoder,
    params,
    prompts,
    np.asarray([70, 64, 65, 2, 1]),
    jax.random.key(0),
    sampling=Sampling(temperature=4.0),
    max_new_tokens=24,
  )
  state = specsample.advance(decoder, params, state, max_rounds=num_rounds)
  kept = np.asarray(state.accepted).sum(axis=0)
  assert not num_rounds or (kept[0] and kept[1:].any())
  assert not np.asarray(state.done).any()
  # The next round computes the entries of the last accepted drafts.
  found = _next_caches(params, state, drafter=drafter)
  _, fresh = _propose(
    params,
    state.tokens,
    state.length,
    drafter=_as(_DRAFTERS[name], dtype=drafter.model.dtype),
    draw=_second,
  )
  errors = []
  for i, (of_module, of_fresh) in enumerate(
    zip(found, fresh.caches, strict=True)
  ):
    length = np.maximum(np.asarray(state.length) - 1 - i, 0)
    np.testing.assert_array_equal(of_module.length, length)
    size = of_module.keys[0].shape[2]
    is_entry = np.arange(size) < length[:, None]
    for ours, expected in zip(
      of_module.keys + of_module.values,
      of_fresh.keys + of_fresh.values,
      strict=True,
    ):
      ours, expected = (
        np.asarray(x, np.float64).swapaxes(1, 2)[is_entry]
        for x in (ours, expected)
      )
      errors.append(np.abs(ours - expected).max() / expected.std())
  return max(errors)


@functools.partial(jax.jit, static_argnames='drafter')
def _next_caches(params, state, *, drafter):
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  _, after = drafter.propose(
    params, _second, warp, state.tokens, state.length, state.draft
  )
  return after.caches


# A target's outputs depend in the last bits on how many tokens a pass reads.
_TOLERANCES = {'float32': 1e-3, 'bfloat16': 0.1}


@pytest.mark.nightly(but=('mtp of 2-float32-0', 'mtp of 2-float32-6'))
@pytest.mark.parametrize(
  ('dtype', 'num_rounds'), [('float32', 0), ('float32', 6), ('bfloat16', 6)]
)
@_few
def test_the_cache_is_of_the_targets_own_features(name, dtype, num_rounds):
  drafter = _as(_DRAFTERS[name], dtype=dtype)
  assert _cache_error(drafter, name, num_rounds) < _TOLERANCES[dtype]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KeepsGuesses(drafters.Eagle):
  """A faulty drafter that caches accepted drafts from its own outputs."""

  def propose(self, params, draw, warp, tokens, length, state):
    (cache,), (held,) = state.caches, state.features
    features = held[:, : self.num_draft_tokens + 1]
    index = cache.length[:, None] + 1 + jnp.arange(_K + 1)
    new = jnp.take_along_axis(tokens, index, axis=1)
    outputs, _ = self._run(params, 0, new, features, cache)
    later = held[:, features.shape[1] :]
    guesses = [features[:, :1], outputs[:, :-1], later]
    guesses = jnp.concatenate(guesses, axis=1)
    state = dataclasses.replace(state, features=(guesses,))
    return super().propose(params, draw, warp, tokens, length, state)


def test_a_cache_of_guesses_is_noticed():
  model = dataclasses.replace(_TARGET, dtype='bfloat16')
  drafter = _KeepsGuesses(model=model, **_SOME)
  assert _cache_error(drafter, 'eagle', 6) > 5 * _TOLERANCES['bfloat16']


_OF_RINGS = {
  'eagle3': ('eagle3', lambda chain: chain, [5 + _K + 1]),
  'p-eagle': ('p-eagle', lambda chain: chain, [5 + _K + 1]),
  'mtp of 2': ('mtp of 2', lambda chain: chain, [5 + _K + 2] * 2),
  'tree': (
    'eagle3',
    lambda chain: drafters.Tree(
      drafter=chain, topology=specsample.tree.k_ary((2, 2, 1))
    ),
    [5 + 2 + 4],
  ),
  'dynamic tree': (
    'eagle3',
    lambda chain: drafters.DynamicTree(
      drafter=chain, num_draft_tokens=6, width=4
    ),
    [5 + 4 * (_K - 1)],
  ),
}


def _with_whole_caches(drafter):
  """Returns the drafter with room for whole sequences in all its layers."""

  class Whole(type(drafter)):
    def empty_cache(self, batch_size, max_length, dtype, max_new=None):
      del max_new
      return super().empty_cache(batch_size, max_length, dtype)

  fields = dataclasses.fields(drafter)
  return Whole(**{field.name: getattr(drafter, field.name) for field in fields})


@pytest.mark.parametrize('case', _OF_RINGS)
def test_rings_draft_as_whole_caches_do(case):
  name, wrap, sizes = _OF_RINGS[case]
  chain = _as(_DRAFTERS[name], sliding_window=5)
  prompts = np.random.default_rng(0).integers(_V, size=(5, 70))
  # A chunk of the prompt is longer than a ring; one row has less than a window.
  lengths = np.asarray([70, 64, 65, 9, 1])

  def decode(drafter):
    rule = verify.tree if 'tree' in case else verify.chain
    decoder, params = Decoder(chain.model, drafter, rule), _params(name)
    state = specsample.prefill(
      decoder,
      params,
      prompts,
      lengths,
      jax.random.key(0),
      sampling=Sampling(temperature=4.0),
      max_new_tokens=24,
    )
    return specsample.advance(decoder, params, state, max_rounds=6)

  state, whole = decode(wrap(chain)), decode(wrap(_with_whole_caches(chain)))
  caches = state.draft.caches
  assert [cache.keys[0].shape[2] for cache in caches] == sizes
  assert whole.draft.caches[0].keys[0].shape[2] > 70 + 24
  np.testing.assert_array_equal(state.tokens, whole.tokens)
  np.testing.assert_array_equal(state.accepted, whole.accepted)
  assert np.asarray(state.accepted).sum() > 6
  found = [_next_draft(_params(name), x, drafter=chain) for x in (state, whole)]
  np.testing.assert_allclose(*found, atol=1e-5)


@functools.partial(jax.jit, static_argnames='drafter')
def _next_draft(params, state, *, drafter):
  """Returns the probabilities of the next round's draft tokens, as a chain."""
  warp = lambda logits, drafted: jax.nn.softmax(logits)
  draft, _ = drafter.propose(
    params, _second, warp, state.tokens, state.length, state.draft
  )
  return draft.probs


def test_eagle3_reads_the_papers_layers_by_default():
  deep = testing.tiny_llama(num_layers=30)
  drafter = drafters.Eagle3(model=deep, num_draft_tokens=4)
  # The inputs of layers 2, 15 and 27.
  assert drafter.feature_layers == (1, 14, 26)


@pytest.mark.parametrize('name', ['eagle3', 'mtp of 2'])
def test_the_last_norm_begins_as_the_targets(name):
  target = {**_params(name)['target'], 'norm': {'scale': np.arange(16.0)}}
  drafter = dataclasses.replace(_DRAFTERS[name], draft_vocab_size=None)
  own = drafter.init_params(jax.random.key(0), target)
  for module in own.get('layers', {'only': own}).values():
    np.testing.assert_array_equal(module['norm']['scale'], np.arange(16.0))


def test_no_module_is_refused():
  with pytest.raises(ValueError, match='num_modules is 0: give an integer'):
    dataclasses.replace(_DRAFTERS['mtp'], num_modules=0)


@pytest.mark.parametrize(
  ('layers', 'message'),
  [
    ((0, 3), r'\(0, 3\), but the target has layers 0 to 2'),
    ((-2,), 'name at least one of them, or -1'),
    # One layer is too few for the paper's default layers.
    ((), r'\(1, -1, -3\)'),
  ],
)
def test_layers_that_the_target_has_not_are_refused(layers, message):
  model = _TARGET if layers else dataclasses.replace(_TARGET, num_layers=1)
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_DRAFTERS['eagle3'], model=model, feature_layers=layers)


@_each
def test_a_target_without_layers_is_refused(name):
  with pytest.raises(ValueError, match='layers with the shape of HashModel'):
    dataclasses.replace(_DRAFTERS[name], model=testing.HashModel(vocab_size=_V))
