"""Division by the root mean square, in C++."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample.cpu import native
from specsample.models import layers

pytestmark = pytest.mark.skipif(
  not native.is_available(), reason='the C++ files cannot be built here'
)


def _normal(*shape):
  return jax.random.normal(jax.random.key(0), shape)


@pytest.mark.parametrize('shape', [(576,), (3, 5), (2, 3, 41), (256, 8)])
def test_it_is_that_of_xla(shape):
  x = _normal(*shape)
  program = str(jax.make_jaxpr(lambda x: layers.rms_normed(x, 1e-2))(x))
  assert 'specsample_norm' in program
  expected = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-2)
  np.testing.assert_allclose(layers.rms_normed(x, 1e-2), expected, rtol=1e-6)


def test_gradients_are_those_of_xla():
  x = _normal(3, 41)
  gradient = lambda norm: jax.grad(lambda x: jnp.sum(jnp.sin(norm(x, 1e-2))))(x)
  np.testing.assert_allclose(
    gradient(layers.rms_normed), gradient(layers._rms_normed), atol=1e-6
  )


def test_other_dtypes_use_xla():
  x = _normal(3, 8).astype(jnp.bfloat16)
  program = str(jax.make_jaxpr(lambda x: layers.rms_normed(x, 1e-2))(x))
  assert 'specsample_norm' not in program
  assert layers.rms_normed(x, 1e-2).dtype == jnp.float32
