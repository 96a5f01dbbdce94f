"""Caches of every kind, for chains and trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import testing
from specsample.models import attention
from specsample.models import cache as cache_lib
from specsample.models import gated_delta
from specsample.models import int8

_WINDOW, _FED, _ROOM = 6, 5, 64
_LLAMA = testing.tiny_llama(vocab_size=24, num_layers=3)
_SLIDING = dataclasses.replace(
  _LLAMA, sliding_window=_WINDOW, sliding_layers=(0, 2)
)
_LATENT = dataclasses.replace(
  _LLAMA,
  latent=attention.Latent(kv_rank=12, rope_dim=4, head_dim=6, value_dim=5),
)
_SINKS = dataclasses.replace(_SLIDING, has_sinks=True)
# Layers 2 and 3 read the keys and values of layers 0 and 1.
_SHARED = dataclasses.replace(
  _SLIDING,
  num_layers=4,
  sliding_layers=(0, 2),
  full_head_dim=6,
  full_kv_heads=1,
  values_are_keys=True,
  has_value_norm=True,
  num_shared=2,
  layer_input_dim=4,
)
_RECURRENT = dataclasses.replace(
  _LLAMA,
  num_layers=4,
  delta=gated_delta.Delta(
    layers=(0, 1, 3),
    num_key_heads=2,
    num_value_heads=6,
    key_dim=8,
    value_dim=5,
  ),
)
_MODELS = {
  'full': _LLAMA,
  'ring': _SLIDING,
  'latent': _LATENT,
  'latent_ring': dataclasses.replace(_LATENT, sliding_window=_WINDOW),
  'sinks': _SINKS,
  'shared': _SHARED,
  'int8_shared': dataclasses.replace(_SHARED, has_int8_cache=True),
  'int8': dataclasses.replace(_LLAMA, has_int8_cache=True),
  'int8_ring': dataclasses.replace(_SLIDING, has_int8_cache=True),
  'int8_sinks': dataclasses.replace(_SINKS, has_int8_cache=True),
  'recurrent': _RECURRENT,
  'recurrent_ring': dataclasses.replace(_RECURRENT, sliding_window=_WINDOW),
  'int8_latent': dataclasses.replace(_LATENT, has_int8_cache=True),
}


@functools.cache
def _params(name):
  params = _MODELS[name].init(jax.random.key(0))
  if _MODELS[name].is_recurrent:
    params = testing.with_noise(params, jax.random.key(1), 0.3)
  params = jax.tree.map(lambda leaf: 1.6 * leaf, params)
  if _MODELS[name].has_sinks:
    for i, layer in params['layers'].items():
      layer['attention']['sinks'] = jnp.asarray([1.0, 3.0, -1.0, 2.0]) + i
  return params


# An int8 value between two integers may be rounded to either. A different
# rounding moves all later logits by about 1e-3, and a wrong token by 1e-1.
@pytest.mark.nightly(but=('full', 'latent_ring', 'int8_shared', 'int8_sinks'))
@pytest.mark.parametrize('name', _MODELS)
def test_passes_over_a_cache_equal_those_without(name):
  testing.assert_model(
    _MODELS[name],
    _params(name),
    features=(-1, 1),
    length=40,
    max_new=_FED,
    feeds_once=_MODELS[name].is_recurrent,
    tolerance=0.02 if 'int8' in name else 1e-4,
  )


@pytest.mark.nightly(but=('int8_ring',))
@pytest.mark.parametrize('name', ['ring', 'int8_ring'])
def test_a_chunk_that_is_longer_than_the_window_leaves_it(name):
  testing.assert_model(
    *(_MODELS[name], _params(name)),
    max_new=3 * _WINDOW,
    has_trees=False,
    tolerance=0.02 if 'int8' in name else 1e-4,
  )


@pytest.mark.parametrize('name', _MODELS)
def test_a_path_is_appended_as_it_is_moved(name):
  """The two ways to keep the path of a tree leave the same cache."""
  model, params = _MODELS[name], _params(name)
  rng = np.random.default_rng(0)
  tokens = lambda n: rng.integers(model.vocab_size, size=(2, n), dtype=np.int32)
  cache = model.init_cache(2, _ROOM, max_new=_FED)
  _, cache = model.apply(params, tokens(4), cache)
  cache = model.commit(cache, np.asarray([4, 3], np.int32))
  # Nodes 1 and 2 follow the root, 3 follows 2, and 4 follows 3 or 1.
  parents = np.asarray([[0, 0, 2, 3], [0, 0, 2, 1]], np.int32)
  path = np.asarray([[0, 2, 3, 4], [0, 1, 4, 0]], np.int32)
  fed, start = tokens(5), np.asarray([4, 3], np.int32)
  length = start + np.asarray([4, 3], np.int32)
  _, after = model.apply(params, fed, cache, parents=parents)
  moved = model.commit(after, length, start[:, None] + path)
  _, new = model.read(params, fed, cache, parents=parents)
  appended = model.commit(model.append(cache, new, path), length)
  following = tokens(2)
  expected, _ = model.apply(params, following, moved)
  found, _ = model.apply(params, following, appended)
  np.testing.assert_array_equal(found.logits, expected.logits)


def test_memory_does_not_grow_with_the_square_of_the_cache():
  nodes = jnp.zeros((1, 9), jnp.int32)
  parents = jnp.zeros((1, 8), jnp.int32)

  def temporary(size):
    cache = jax.eval_shape(lambda: _LLAMA.init_cache(1, size))
    lowered = jax.jit(_LLAMA.apply).lower(
      _params('full'), nodes, cache, parents=parents
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert temporary(8192) < 2.2 * temporary(4096)


def test_a_ring_holds_a_window_and_what_is_fed():
  cache = _SLIDING.init_cache(2, _ROOM, max_new=_FED)
  sizes = [cache_lib.size(entries) for entries in cache.keys]
  assert sizes == [_WINDOW + _FED, _ROOM, _WINDOW + _FED]
  assert cache.rings == (0, 2)
  unlimited = _SLIDING.init_cache(2, _ROOM)
  assert unlimited.rings == ()
  assert {cache_lib.size(entries) for entries in unlimited.keys} == {_ROOM}


def test_more_tokens_than_a_ring_has_room_for_are_refused():
  cache = _SLIDING.init_cache(1, _ROOM, max_new=_FED)
  tokens = jnp.zeros((1, _WINDOW + _FED + 1), jnp.int32)
  with pytest.raises(ValueError, match=r'12 tokens .* room for 11.*max_new'):
    jax.eval_shape(_SLIDING.apply, _params('ring'), tokens, cache)


def test_shared_entries_exist_once():
  cache = _SHARED.init_cache(2, _ROOM)
  shapes = [None if leaf is None else leaf.shape for leaf in cache.keys]
  assert shapes == [(2, 2, _ROOM, 8), (2, 1, _ROOM, 6), None, None]


def test_latent_entries_are_one_vector_for_all_heads():
  cache = _LATENT.init_cache(2, _ROOM)
  assert {leaf.shape for leaf in cache.keys} == {(2, 1, _ROOM, 12 + 4)}
  assert cache.values == (None,) * _LATENT.num_layers


@pytest.mark.parametrize(
  ('name', 'value'),
  [('has_sinks', True), ('has_output_gate', True), ('num_shared', 1)],
)
def test_what_latent_attention_would_ignore_is_refused(name, value):
  with pytest.raises(
    ValueError, match=f'{name} is {value}, which attention over latent vectors'
  ):
    dataclasses.replace(_LATENT, **{name: value})


def test_a_model_without_layers_is_refused():
  with pytest.raises(
    ValueError, match='num_layers is 0: give an integer of at'
  ):
    dataclasses.replace(_LATENT, num_layers=0)


def test_int8_vectors_err_by_half_a_scale():
  x = jax.random.normal(jax.random.key(0), (3, 7, 16))
  stored = int8.quantise(x)
  assert stored.values.dtype == jnp.int8
  error = np.abs(stored.values * stored.scale - x)
  largest = np.abs(x).max(axis=-1, keepdims=True)
  assert (error <= largest / 254 * (1 + 1e-5)).all()
  assert (error > largest / 400).any()
  zeros = int8.quantise(jnp.zeros((2, 4)))
  np.testing.assert_array_equal(zeros.values * zeros.scale, 0)


def test_an_int8_cache_errs_little():
  tokens = np.random.default_rng(0).integers(_LLAMA.vocab_size, size=(1, 40))
  exact, found = (
    model.apply(_params('full'), tokens, model.init_cache(1, 0))[0].logits
    for model in (_LLAMA, _MODELS['int8'])
  )
  error = np.sqrt(np.mean((found - exact) ** 2))
  # 0.049 or 0.050 of it, depending on the processor; 7 bits would double it.
  assert 0 < error < 0.07 * np.std(exact)
