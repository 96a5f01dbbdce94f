"""A tree in one pass: each path gets the logits that it would get alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import testing
from specsample import tree

_LLAMA = testing.tiny_llama(vocab_size=24, num_layers=2)
_MODELS = {
  'llama': _LLAMA,
  'window': dataclasses.replace(_LLAMA, sliding_window=4),
  'hash': testing.HashModel(vocab_size=24),
}
_TREE = tree.Topology((0, 0, 1, 1, 3, 0, 5))
_LENGTHS = np.asarray([6, 1, 3])
_RNG = np.random.default_rng(0)
_PROMPTS = _RNG.integers(24, size=(3, 6))
_NODES = _RNG.integers(24, size=(3, _TREE.num_nodes + 1))
_each = pytest.mark.parametrize('name', _MODELS)


@functools.cache
def _params(name):
  if name == 'hash':
    return {}
  return jax.tree.map(lambda x: 1.6 * x, _LLAMA.init(jax.random.key(0)))


def _prefilled(name):
  model = _MODELS[name]
  cache = model.init_cache(3, 32)
  _, cache = model.apply(_params(name), jnp.asarray(_PROMPTS), cache)
  return model, model.commit(cache, jnp.asarray(_LENGTHS))


def _alone(name, row, path):
  """Returns the last logits of a prompt that is followed by a path of nodes."""
  model = _MODELS[name]
  text = np.concatenate([_PROMPTS[row, : _LENGTHS[row]], _NODES[row, path]])
  # Tokens that follow don't change a token's logits.
  padded = np.pad(text, (0, 12 - text.size))[None]
  output, _ = _whole(_params(name), padded, model=model)
  return output.logits[0, text.size - 1]


@functools.partial(jax.jit, static_argnames='model')
def _whole(params, tokens, *, model):
  return model.apply(params, tokens, model.init_cache(1, 0))


def _paths():
  paths = [[0]]
  for i, parent in enumerate(_TREE.parents):
    paths.append([*paths[parent], i + 1])
  return paths


@_each
@pytest.mark.parametrize('sizes', [(8,), (1, 3, 4), (1, 2, 2, 3)])
def test_every_node_sees_what_its_path_would(name, sizes):
  model, cache = _prefilled(name)
  parents = jnp.tile(jnp.asarray(_TREE.parents), (3, 1))
  logits, start = [], 0
  # In one pass, or a few nodes at a time.
  for size in sizes:
    output, cache = jax.jit(model.apply)(
      _params(name),
      jnp.asarray(_NODES[:, start : start + size]),
      cache,
      parents=parents[:, : start + size - 1],
    )
    logits.append(output.logits)
    start += size
  found = np.concatenate(logits, axis=1)
  for row in range(3):
    for node, path in enumerate(_paths()):
      expected = _alone(name, row, path)
      np.testing.assert_allclose(found[row, node], expected, atol=1e-4)


@_each
def test_a_kept_path_is_moved_into_place(name):
  model, cache = _prefilled(name)
  parents = jnp.tile(jnp.asarray(_TREE.parents), (3, 1))
  _, cache = model.apply(
    _params(name), jnp.asarray(_NODES), cache, parents=parents
  )
  # Keep a whole path, none of it, and one's first node; the rest is ignored.
  kept = np.asarray([[0, 1, 3, 5], [0, 0, 0, 0], [0, 6, 7, 0]])
  counts = np.asarray([4, 1, 2])
  cache = model.commit(
    cache,
    jnp.asarray(_LENGTHS + counts),
    jnp.asarray(_LENGTHS[:, None] + kept),
  )
  last = np.asarray([[9], [8], [7]])
  output, _ = model.apply(_params(name), jnp.asarray(last), cache)
  for row, count in enumerate(counts):
    text = np.concatenate(
      [
        _PROMPTS[row, : _LENGTHS[row]],
        _NODES[row, kept[row, :count]],
        last[row],
      ]
    )
    expected, _ = _whole(_params(name), text[None], model=model)
    np.testing.assert_allclose(
      output.logits[row, 0], expected.logits[0, -1], atol=1e-4
    )


def test_memory_does_not_grow_with_the_square_of_the_cache():
  model = _LLAMA
  nodes = jnp.zeros((1, 9), jnp.int32)
  parents = jnp.zeros((1, 8), jnp.int32)

  def temporary(size):
    cache = jax.eval_shape(lambda: model.init_cache(1, size))
    lowered = jax.jit(model.apply).lower(
      _params('llama'), nodes, cache, parents=parents
    )
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert temporary(8192) < 2.2 * temporary(4096)
