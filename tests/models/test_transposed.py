"""Matrices stored for products with few rows on a CPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import sharding
from specsample import testing
from specsample.models import checkpoint
from specsample.models import int8
from specsample.models import matrices
from specsample.models import processor
from specsample.models import transposed

_MODEL = testing.tiny_llama(vocab_size=40, num_layers=2)
_IS_TIED = [False, True]


@pytest.fixture(autouse=True)
def no_avx512(monkeypatch):
  monkeypatch.setattr(processor, 'has_avx512', lambda: False)


def _params(model):
  # Larger than at initialisation, so that the logits tell tokens apart.
  return jax.tree.map(lambda x: 1.6 * x, model.init(jax.random.key(0)))


def _transposed(model, params):
  convert = functools.partial(transposed.as_is_fast_here, model)
  return jax.tree_util.tree_map_with_path(convert, params)


def _product(x, kernel):
  return matrices.product(x, kernel, ('batch', None), jnp.float32)


@pytest.mark.parametrize('num_rows', [*range(1, 18), 128, 129])
def test_products_and_gradients_are_those_of_the_array(num_rows):
  x = jax.random.normal(jax.random.key(0), (num_rows, 24))
  kernel = jax.random.normal(jax.random.key(1), (24, 40))
  stored = transposed.Transposed(values=kernel.T)
  np.testing.assert_allclose(_product(x, stored), x @ kernel, atol=1e-4)
  loss = lambda x, kernel: jnp.sum(jnp.sin(_product(x, kernel)))
  found = jax.grad(loss, argnums=(0, 1))(x, stored)
  expected = jax.grad(loss, argnums=(0, 1))(x, kernel)
  np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
  np.testing.assert_allclose(found[1].values.T, expected[1], atol=1e-4)


@pytest.mark.parametrize(('num_rows', 'computed'), [(3, 3), (5, 8), (9, 16)])
def test_the_weights_are_the_left_side(num_rows, computed):
  x = jnp.ones((num_rows, 24))
  stored = transposed.Transposed(values=jnp.ones((40, 24)))
  program = jax.jit(_product).lower(x, stored).compile().as_text()
  (shape,) = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', program)
  assert shape == f'40,{computed}'


@pytest.mark.parametrize('is_tied', _IS_TIED)
def test_a_model_reads_them(is_tied):
  model = dataclasses.replace(_MODEL, tie_embeddings=is_tied)
  params = _params(model)
  stored = _transposed(model, params)
  assert transposed.is_transposed(stored['embedding']) == is_tied
  assert transposed.is_transposed(stored.get('unembedding')) != is_tied
  kernel = stored['layers'][1]['mlp']['down']['kernel']
  assert transposed.is_transposed(kernel)
  assert kernel.shape == (model.mlp_dim, model.dim)
  assert not transposed.is_transposed(stored['norm']['scale'])
  tokens = np.random.default_rng(0).integers(40, size=(2, 6))
  logits = lambda params: (
    model.apply(params, tokens, model.init_cache(2, 6))[0].logits
  )
  np.testing.assert_allclose(logits(stored), logits(params), atol=1e-4)


@pytest.mark.parametrize('is_tied', _IS_TIED)
def test_the_same_is_decoded(is_tied):
  model = dataclasses.replace(_MODEL, tie_embeddings=is_tied)
  params = _transposed(model, _params(model))
  testing.assert_greedy_equal(
    {'target': params, 'drafter': _params(model)},
    np.asarray([[3, 23, 22, 1], [21, 4, 0, 0]]),
    np.asarray([4, 2]),
    model=model,
    drafter=specsample.drafters.Chain(model=model, num_draft_tokens=3),
    verify=specsample.verify.chain,
    max_new_tokens=12,
  )


@pytest.fixture(scope='module', params=_IS_TIED)
def saved(request, tmp_path_factory):
  """A folder with a model, and its parameters."""
  model = dataclasses.replace(_MODEL, tie_embeddings=request.param)
  params = _params(model)
  folder = tmp_path_factory.mktemp('saved') / 'model'
  checkpoint.save(folder, model, params)
  return folder, params


def test_loading_transposes_for_a_cpu_alone(saved, monkeypatch):
  folder, params = saved
  kernel = lambda loaded: loaded.params['layers'][0]['mlp']['up']['kernel']
  loaded = specsample.load(folder)
  assert transposed.is_transposed(kernel(loaded))
  jax.tree.map(
    np.testing.assert_array_equal, transposed.plain(loaded.params), params
  )
  narrow = specsample.load(folder, dtype='bfloat16')
  assert isinstance(kernel(narrow), jax.Array)
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    assert isinstance(kernel(specsample.load(folder)), jax.Array)
  monkeypatch.setattr(processor, 'has_avx512', lambda: True)
  assert isinstance(kernel(specsample.load(folder)), jax.Array)


def test_nothing_else_tells_them_from_the_arrays(saved, tmp_path):
  folder, params = saved
  loaded = specsample.load(folder)
  plain = dataclasses.replace(loaded, params=params)
  assert loaded.fingerprint == plain.fingerprint
  checkpoint.save(tmp_path / 'again', loaded.model, loaded.params)
  jax.tree.map(
    np.testing.assert_array_equal,
    transposed.plain(specsample.load(tmp_path / 'again').params),
    params,
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    int8.weights(loaded.params),
    int8.weights(params),
  )
  stored = loaded.params['layers'][0]['mlp']['up']['kernel']
  np.testing.assert_array_equal(
    np.asarray(stored), params['layers'][0]['mlp']['up']['kernel']
  )


@pytest.mark.parametrize('tied', _IS_TIED)
def test_plain_parameters_are_stored_again_as_they_were(tied):
  model = dataclasses.replace(_MODEL, tie_embeddings=tied)
  stored = _transposed(model, _params(model))
  again = transposed.like(transposed.plain(stored), stored)
  assert jax.tree.structure(again) == jax.tree.structure(stored)
  for found, expected in zip(
    *map(jax.tree.leaves, (again, stored)), strict=True
  ):
    np.testing.assert_array_equal(found, expected)
  unchanged = transposed.like(stored, stored)
  assert jax.tree.structure(unchanged) == jax.tree.structure(stored)
