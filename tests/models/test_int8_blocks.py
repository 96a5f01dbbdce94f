"""Matrices kept as the Q8_0 of GGUF files."""

import dataclasses
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import checks
from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample import verify
from specsample.drafters import vocabulary
from specsample.models import checkpoint
from specsample.models import fingerprint
from specsample.models import int8_blocks
from specsample.models import matrices

_Q8_0 = gguf.GGMLQuantizationType.Q8_0
_NUM_OUT, _NUM_IN = 40, 64


def _is_kept(leaf):
  return isinstance(leaf, int8_blocks.Int8Blocks)


@pytest.fixture
def kernel():
  """A random matrix of 40 outputs and two blocks of inputs for each."""
  rng = np.random.default_rng(0)
  return int8_blocks.Int8Blocks(
    values=rng.integers(-127, 128, (_NUM_OUT, _NUM_IN)).astype(np.int8),
    scale=rng.uniform(0.001, 0.01, (_NUM_OUT, 2)).astype(np.float16),
  )


@pytest.fixture
def in_parts(monkeypatch):
  """Products of 12 outputs at a time, of which the last part has only 4."""
  monkeypatch.setattr(int8_blocks, '_PART_ELEMENTS', 12 * _NUM_IN + 5)


def _product(x, kernel):
  return matrices.product(x, kernel, ('batch', None), jnp.float32)


def _whole(kernel):
  """Returns the array [in, out], computed block by block."""
  blocks = np.split(np.asarray(kernel.values, np.float32), 2, axis=1)
  scales = np.split(np.asarray(kernel.scale, np.float32), 2, axis=1)
  return np.concatenate(list(map(np.multiply, blocks, scales)), axis=1).T


def test_the_array_has_a_scale_per_block(kernel):
  assert kernel.shape == (_NUM_IN, _NUM_OUT)
  whole = _whole(kernel)
  assert abs(whole[40, 3]) == np.float32(kernel.scale[3, 1]) * abs(
    int(kernel.values[3, 40])
  )
  np.testing.assert_array_equal(matrices.dense(kernel, jnp.float32), whole)
  ids = np.asarray([[39, 0], [7, 7]])
  found = matrices.lookup(kernel, ids, sharding.Axis('vocab', 40), 'float32')
  np.testing.assert_array_equal(found, whole.T[ids])


@pytest.mark.parametrize('num_rows', [1, 3, 9, 130])
@pytest.mark.usefixtures('in_parts')
def test_products_and_gradients_are_those_of_the_array(kernel, num_rows):
  x = jax.random.normal(jax.random.key(0), (num_rows, _NUM_IN))
  whole = _whole(kernel)
  np.testing.assert_allclose(_product(x, kernel), x @ whole, atol=1e-4)
  loss = lambda x, kernel: jnp.sum(jnp.sin(_product(x, kernel)))
  found, expected = jax.grad(loss)(x, kernel), jax.grad(loss)(x, whole)
  np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.usefixtures('in_parts')
def test_bfloat16_rounds_the_weights_as_loading_does(kernel):
  x = jax.random.normal(jax.random.key(0), (3, _NUM_IN)).astype(jnp.bfloat16)
  whole = _whole(kernel).astype(jnp.bfloat16)
  expected = x.astype(jnp.float32) @ whole.astype(jnp.float32)
  np.testing.assert_allclose(_product(x, kernel), expected, atol=1e-4)


@pytest.mark.parametrize(('limit', 'num_out'), [(12 * _NUM_IN, 12), (1e6, 20)])
def test_no_step_writes_the_whole_matrix(kernel, monkeypatch, limit, num_out):
  monkeypatch.setattr(int8_blocks, '_PART_ELEMENTS', int(limit))
  # Traces are cached, so no other test multiplies as many rows.
  x = jnp.ones((num_out // 5, _NUM_IN))
  program = jax.jit(_product).lower(x, kernel).compile().as_text()
  sizes = [
    np.prod([int(n) for n in shape.split(',')])
    for shape in re.findall(r'f32\[([\d,]+)\]', program)
  ]
  assert max(sizes) == num_out * _NUM_IN


def test_meshes_are_refused(kernel):
  message = "'q8_0'.* mesh.*'int8' or None"
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    with pytest.raises(ValueError, match=message):
      _product(jnp.ones((3, _NUM_IN)), kernel)
    with pytest.raises(ValueError, match=message):
      matrices.lookup(kernel, jnp.zeros(1, int), 'vocab', jnp.float32)
    with pytest.raises(ValueError, match=message):
      specsample.load('any.gguf', weights='q8_0')


def _stored(matrix):
  """Returns a matrix [in, out] in Q8_0."""
  quantised = gguf.quantize(np.asarray(matrix).T, _Q8_0)
  blocks = quantised.reshape(len(quantised), -1, 34)
  return int8_blocks.Int8Blocks(
    values=jnp.asarray(blocks[..., 2:].view(np.int8).reshape(matrix.T.shape)),
    scale=jnp.asarray(blocks[..., :2].view(np.float16)[..., 0]),
  )


@pytest.fixture(scope='module', params=[False, True])
def target(request, tiny_llama):
  """A model, its parameters with matrices in Q8_0, and the same as arrays."""
  model = dataclasses.replace(tiny_llama[0], tie_embeddings=request.param)
  params = dict(tiny_llama[1])
  if model.tie_embeddings:
    del params['unembedding']
  kept = jax.tree.map(lambda x: _stored(x) if x.ndim == 2 else x, params)
  plain = lambda x: matrices.dense(x, jnp.float32) if _is_kept(x) else x
  return model, kept, jax.tree.map(plain, kept, is_leaf=_is_kept)


def test_the_same_is_decoded(target):
  model, kept, plain = target
  assert _is_kept(kept['embedding']) and not _is_kept(plain['embedding'])
  checks.parameters('params', model, kept)
  testing.assert_greedy_equal(
    {'target': kept, 'drafter': plain},
    np.asarray([[3, 23, 22, 1], [21, 4, 0, 0]]),
    np.asarray([4, 2]),
    model=model,
    drafter=drafters.Chain(model=model, num_draft_tokens=3),
    verify=verify.chain,
    max_new_tokens=12,
  )


def test_drafters_begin_as_with_the_arrays(target):
  model, kept, plain = target
  d2t = np.asarray([5, 1, 90])
  found, expected = (
    vocabulary.of_target(model, params, d2t) for params in (kept, plain)
  )
  np.testing.assert_allclose(
    found['unembedding'], expected['unembedding'], atol=1e-6
  )
  drafter = drafters.DraftModel(model=model, num_draft_tokens=2, layers=(1,))
  found, expected = (
    drafter.init_params(jax.random.key(1), params) for params in (kept, plain)
  )
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_they_are_not_saved_and_have_no_shadow(target, tmp_path):
  model, kept, plain = target
  with pytest.raises(ValueError, match=r'embedding.* in int8.*weights=None'):
    checkpoint.save(tmp_path / 'model', model, kept)
  assert not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match=r'shadow would save nothing'):
    model.shadow(kept)
  assert fingerprint.compute(kept) == fingerprint.compute(plain)
