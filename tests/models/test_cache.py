"""Caches of every kind: feeding, committing and going on equals a prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import testing
from specsample import tree
from specsample.models import attention
from specsample.models import cache as cache_lib
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
_MODELS = {
  'full': _LLAMA,
  'ring': _SLIDING,
  'latent': _LATENT,
  'latent_ring': dataclasses.replace(_LATENT, sliding_window=_WINDOW),
  'int8': dataclasses.replace(_LLAMA, has_int8_cache=True),
  'int8_ring': dataclasses.replace(_SLIDING, has_int8_cache=True),
  'int8_latent': dataclasses.replace(_LATENT, has_int8_cache=True),
}
_TREE = tree.Topology((0, 0, 1, 3))  # 5 nodes
_each = pytest.mark.parametrize('name', _MODELS)
_RNG = np.random.default_rng(0)


@functools.cache
def _params(name):
  params = _MODELS[name].init(jax.random.key(0))
  return jax.tree.map(lambda leaf: 1.6 * leaf, params)


@functools.partial(jax.jit, static_argnames='model')
def _apply(params, tokens, cache, parents=None, *, model):
  return model.apply(params, tokens, cache, parents=parents)


def _alone(name, text):
  """Returns the logits of every token of a text, from one pass of its own."""
  model = _MODELS[name]
  padded = np.zeros((1, _ROOM), np.int32)
  padded[0, : len(text)] = text
  cache = model.init_cache(1, _ROOM)
  output, _ = _apply(_params(name), padded, cache, model=model)
  return np.asarray(output.logits[0, : len(text)])


def _close(name, found, expected):
  """Compares logits, with more tolerance for int8 caches.

  An int8 value between two integers may be rounded to either. A different
  rounding moves all later logits by about 1e-3, and a wrong token by 1e-1.
  """
  error = np.abs(np.asarray(found) - expected)
  if 'int8' in name:
    assert np.median(error) < 5e-3
  assert error.max() < (0.2 if 'int8' in name else 1e-4)


def _draw(*shape):
  return _RNG.integers(_LLAMA.vocab_size, size=shape)


@_each
def test_rows_that_keep_what_they_like_equal_prefills(name):
  model, params = _MODELS[name], _params(name)
  cache = model.init_cache(3, _ROOM, max_new=_FED)
  rows = [[], [], []]
  for turn in range(9):
    tokens = _draw(3, _FED)
    output, cache = _apply(params, tokens, cache, model=model)
    for row, new, logits in zip(rows, tokens, output.logits, strict=True):
      text = [*row, *new]
      _close(name, logits, _alone(name, text)[len(row) :])
    # Keep all, none or some, to pass the window's edge at every offset.
    counts = np.asarray([_FED, turn % (_FED + 1), (3 * turn) % (_FED + 1)])
    for row, new, count in zip(rows, tokens, counts, strict=True):
      row += new[:count].tolist()
    cache = model.commit(cache, jnp.asarray([len(row) for row in rows]))
  assert len(rows[0]) > 4 * _WINDOW


@_each
def test_kept_paths_of_trees_equal_prefills(name):
  model, params = _MODELS[name], _params(name)
  cache = model.init_cache(2, _ROOM, max_new=_FED)
  rows = [[], []]
  parents = jnp.broadcast_to(jnp.asarray(_TREE.parents), (2, 4))
  paths = ([0, 2], [0, 1, 3, 4], [0])
  for turn in range(8):
    nodes = _draw(2, _FED)
    output, cache = _apply(params, nodes, cache, parents, model=model)
    kept = [paths[turn % 3], paths[(turn + 1) % 3]]
    for i, (row, path) in enumerate(zip(rows, kept, strict=True)):
      text = [*row, *nodes[i, path]]
      logits = np.asarray(output.logits[i])[path]
      _close(name, logits, _alone(name, text)[len(row) :])
      row += nodes[i, path].tolist()
    start = np.asarray(cache.length)[:, None] - _FED
    padded = [path + [0] * (4 - len(path)) for path in kept]
    lengths = jnp.asarray([len(row) for row in rows])
    cache = model.commit(cache, lengths, jnp.asarray(start + padded))


@_each
def test_a_prompt_padded_at_its_end_leaves_the_window(name):
  """Rows of different lengths share a chunk, and see only their own tokens."""
  model, params = _MODELS[name], _params(name)
  chunk = 4 * _WINDOW
  cache = model.init_cache(3, _ROOM, max_new=chunk)
  tokens, lengths = _draw(3, chunk), np.asarray([chunk, _WINDOW + 1, 1])
  _, cache = _apply(params, tokens, cache, model=model)
  cache = model.commit(cache, jnp.asarray(lengths))
  more = _draw(3, _FED)
  output, _ = _apply(params, more, cache, model=model)
  for i, length in enumerate(lengths):
    text = [*tokens[i, :length], *more[i]]
    _close(name, output.logits[i], _alone(name, text)[length:])


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


def test_latent_entries_are_one_vector_for_all_heads():
  cache = _LATENT.init_cache(2, _ROOM)
  assert {leaf.shape for leaf in cache.keys} == {(2, 1, _ROOM, 12 + 4)}
  assert cache.values == (None,) * _LATENT.num_layers


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
  text = _draw(40)
  exact, found = (
    _alone(name, text) for name in ('full', 'int8')
  )  # with the same parameters
  error = np.sqrt(np.mean((found - exact) ** 2))
  # 0.049 or 0.050 of it, depending on the processor; 7 bits would double it.
  assert 0 < error < 0.07 * np.std(exact)
