"""Products of one row on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import sharding
from specsample import testing
from specsample.models import matrices
from specsample.models import one_row
from specsample.models import processor


@pytest.fixture(autouse=True)
def three_wide_cores(monkeypatch):
  """Makes this machine one of three cores with AVX-512."""
  monkeypatch.setattr(processor, 'has_avx512', lambda: True)
  monkeypatch.setattr(processor, 'num_cores', lambda: 3)


def _product(x, kernel):
  return matrices.product(x, kernel, ('batch', None), jnp.float32)


def _normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize('num_rows', [1, 2])
def test_products_and_gradients_are_those_of_the_array(num_rows):
  x, kernel = _normal(0, num_rows, 288), _normal(1, 288, 256)
  np.testing.assert_allclose(_product(x, kernel), x @ kernel, atol=1e-4)
  loss = lambda product: lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel)))
  found = jax.grad(loss(_product), argnums=(0, 1))(x, kernel)
  expected = jax.grad(loss(jnp.matmul), argnums=(0, 1))(x, kernel)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-3)


def _parts_of_products(num_rows, kernel):
  jaxpr = str(jax.make_jaxpr(_product)(jnp.ones((num_rows, 288)), kernel))
  return 3 if 'f32[3,' in jaxpr else 1


def test_only_one_row_is_divided():
  kernel = jnp.ones((288, 256))
  assert _parts_of_products(1, kernel) == 3
  assert _parts_of_products(2, kernel) == 1


def test_a_part_for_each_core(monkeypatch):
  kernel = jnp.ones((288, 256))
  assert one_row.num_parts(kernel) == 3
  assert one_row.num_parts(jnp.ones((288, 128))) == 1  # small
  assert one_row.num_parts(jnp.ones((512, 256))) == 1  # not divisible
  assert one_row.num_parts(kernel.astype(jnp.bfloat16)) == 1
  with jax.set_mesh(sharding.make_mesh(devices=jax.devices()[:1])):
    assert one_row.num_parts(kernel) == 1
  monkeypatch.setattr(processor, 'num_cores', lambda: 64)
  assert one_row.num_parts(kernel) == 8
  monkeypatch.setattr(processor, 'has_avx512', lambda: False)
  assert one_row.num_parts(kernel) == 1


def test_the_same_is_decoded():
  model = testing.tiny_llama(vocab_size=2048, dim=48)
  params = model.init(jax.random.key(0))
  assert one_row.num_parts(params['unembedding']) == 3
  testing.assert_greedy_equal(
    {'target': params, 'drafter': params},
    np.asarray([[3, 23, 22, 1]]),
    np.asarray([4]),
    model=model,
    drafter=specsample.drafters.Chain(model=model, num_draft_tokens=3),
    verify=specsample.verify.chain,
    max_new_tokens=8,
  )
