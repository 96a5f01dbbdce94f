"""Matrices packed for products of few rows on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import sharding
from specsample import testing
from specsample.cpu import native
from specsample.models import checkpoint
from specsample.models import int8
from specsample.models import matrices
from specsample.models import packed
from specsample.models import tensors

_MODEL = testing.tiny_llama(vocab_size=40, num_layers=2)
_IS_TIED = [False, True]

pytestmark = pytest.mark.skipif(
  not native.is_available(), reason='matrices are not packed on this machine'
)


def _params(model):
  # Larger than at initialisation, so that the logits tell tokens apart.
  return jax.tree.map(lambda x: 1.6 * x, model.init(jax.random.key(0)))


def _packed(model, params):
  convert = functools.partial(packed.as_is_fast_here, model)
  return tensors.map_named(convert, params)


def _product(x, kernel):
  return matrices.product(x, kernel, ('batch', None), jnp.float32)


def _normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


# 2051 inputs are more than a block of the kernel; 40 outputs fill no panel.
@pytest.mark.parametrize('shape', [(24, 40), (7, 1), (2051, 96)])
@pytest.mark.parametrize('is_narrow', [False, True])
def test_products_are_those_of_the_array(shape, is_narrow):
  kernel = _normal(1, *shape)
  if is_narrow:
    kernel = kernel.astype(jnp.bfloat16).astype(jnp.float32)
  stored = packed.pack(kernel)
  assert stored.shape == shape
  assert (stored.values.dtype == jnp.bfloat16) == is_narrow
  np.testing.assert_array_equal(np.asarray(stored), kernel)
  for num_rows in (*range(1, 14), 26, 64):
    x = _normal(num_rows, num_rows, shape[0])
    expected = np.asarray(x, float) @ np.asarray(kernel, float)
    np.testing.assert_allclose(_product(x, stored), expected, atol=1e-3)


def test_a_row_has_the_same_bits_in_a_product_of_any_width():
  kernels = [_normal(1, 576, 200), _normal(2, 576, 33)]
  kernels.append(kernels[0].astype(jnp.bfloat16).astype(jnp.float32))
  stored = [packed.pack(kernel) for kernel in kernels]
  rows = _normal(0, 70, 576)
  product = jax.jit(lambda x: packed.products(x, stored))
  whole = product(rows)
  for first in (0, 5, 69):
    for last in range(first + 1, 71):
      for found, expected in zip(product(rows[first:last]), whole, strict=True):
        np.testing.assert_array_equal(found, expected[first:last])


def test_rounded_matrices_hold_the_nearest_bfloat16():
  kernel = _normal(0, 24, 40)
  stored = packed.pack(kernel, is_rounded=True)
  np.testing.assert_array_equal(
    np.asarray(stored), kernel.astype(jnp.bfloat16).astype(jnp.float32)
  )


@pytest.mark.parametrize('is_narrow', [False, True])
def test_columns_are_looked_up(is_narrow):
  kernel = packed.pack(_normal(0, 24, 77), is_rounded=is_narrow)
  ids = np.asarray([[0, 76, 31], [32, 15, 16]])
  found = matrices.lookup(kernel, ids, sharding.Axis('vocab', 77), 'float32')
  np.testing.assert_array_equal(found, np.asarray(kernel).T[ids])


@pytest.mark.parametrize('num_rows', [1, 9])
def test_gradients_are_those_of_the_array(num_rows):
  x, kernel = _normal(0, num_rows, 24), _normal(1, 24, 40)
  loss = lambda x, kernel: jnp.sum(jnp.sin(_product(x, kernel)))
  found = jax.grad(loss, argnums=(0, 1))(x, packed.pack(kernel))
  expected = jax.grad(loss, argnums=(0, 1))(x, kernel)
  np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
  np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


def test_products_can_be_mapped():
  x, kernel = _normal(0, 3, 5, 24), _normal(1, 24, 40)
  found = jax.vmap(_product, (0, None))(x, packed.pack(kernel))
  np.testing.assert_allclose(found, x @ kernel, atol=1e-4)


@pytest.mark.parametrize('is_tied', _IS_TIED)
def test_a_model_reads_them(is_tied):
  model = dataclasses.replace(_MODEL, tie_embeddings=is_tied)
  params = _params(model)
  stored = _packed(model, params)
  assert packed.is_packed(stored['embedding']) == is_tied
  assert packed.is_packed(stored.get('unembedding')) != is_tied
  kernel = stored['layers'][1]['mlp']['down']['kernel']
  assert packed.is_packed(kernel)
  assert kernel.shape == (model.mlp_dim, model.dim)
  assert not packed.is_packed(stored['norm']['scale'])
  tokens = np.random.default_rng(0).integers(40, size=(2, 6))
  logits = lambda params: (
    model.apply(params, tokens, model.init_cache(2, 6))[0].logits
  )
  np.testing.assert_allclose(logits(stored), logits(params), atol=1e-4)


def test_logits_have_the_same_bits_in_a_pass_of_any_width():
  model = testing.tiny_llama(vocab_size=300, num_layers=3)
  params = _packed(model, _params(model))
  tokens = np.random.default_rng(0).integers(300, size=(1, 25))
  read = jax.jit(model.apply)
  _, empty = read(params, tokens[:, :9], model.init_cache(1, 40))
  begin = model.commit(empty, jnp.asarray([9]))
  one_by_one, cache = [], begin
  for i in range(9, 25):
    output, cache = read(params, tokens[:, i : i + 1], cache)
    one_by_one.append(output.logits[0, 0])
    cache = model.commit(cache, jnp.asarray([i + 1]))
  for width in range(2, 17):
    output, _ = read(params, tokens[:, 9 : 9 + width], begin)
    np.testing.assert_array_equal(output.logits[0], one_by_one[:width])


@pytest.mark.parametrize('is_tied', _IS_TIED)
def test_the_same_is_decoded(is_tied):
  model = dataclasses.replace(_MODEL, tie_embeddings=is_tied)
  params = _packed(model, _params(model))
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


def test_loading_packs_on_a_cpu_alone(saved, monkeypatch):
  folder, params = saved
  kernel = lambda loaded: loaded.params['layers'][0]['mlp']['up']['kernel']
  loaded = specsample.load(folder)
  assert packed.is_packed(kernel(loaded))
  jax.tree.map(
    np.testing.assert_array_equal, packed.plain(loaded.params), params
  )
  narrow = specsample.load(folder, dtype='bfloat16')
  assert isinstance(kernel(narrow), jax.Array)
  assert kernel(loaded).values.dtype == jnp.float32
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    assert isinstance(kernel(specsample.load(folder)), jax.Array)
  monkeypatch.setattr(native, 'is_available', lambda: False)
  assert isinstance(kernel(specsample.load(folder)), jax.Array)


def test_what_was_published_in_bfloat16_is_read_in_it(tmp_path):
  params = _params(_MODEL)
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params
  )
  checkpoint.save(tmp_path / 'model', _MODEL, rounded)
  loaded = specsample.load(tmp_path / 'model')
  kernel = loaded.params['layers'][0]['mlp']['up']['kernel']
  assert kernel.values.dtype == jnp.bfloat16
  assert loaded.model.dtype == 'float32'
  jax.tree.map(
    np.testing.assert_array_equal, packed.plain(loaded.params), rounded
  )


def test_nothing_else_tells_them_from_the_arrays(saved, tmp_path):
  folder, params = saved
  loaded = specsample.load(folder)
  plain = dataclasses.replace(loaded, params=params)
  assert loaded.fingerprint == plain.fingerprint
  checkpoint.save(tmp_path / 'again', loaded.model, loaded.params)
  jax.tree.map(
    np.testing.assert_array_equal,
    packed.plain(specsample.load(tmp_path / 'again').params),
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
  stored = _packed(model, _params(model))
  again = packed.like(packed.plain(stored), stored)
  assert jax.tree.structure(again) == jax.tree.structure(stored)
  for found, expected in zip(
    *map(jax.tree.leaves, (again, stored)), strict=True
  ):
    np.testing.assert_array_equal(found, expected)
  unchanged = packed.like(stored, stored)
  assert jax.tree.structure(unchanged) == jax.tree.structure(stored)
