"""`generate` inside the caller's own jit, vmap, scan or grad."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify

_TARGET = testing.HashModel(vocab_size=16, seed=3)
_DRAFTER = drafters.Chain(
  model=dataclasses.replace(_TARGET, noise=0.3), num_draft_tokens=2
)
_PARAMS = {'target': {}, 'drafter': {}}
_PROMPTS, _LENGTHS = specsample.pad_prompts([[1, 2, 3], [5]])
_KEYS = jax.random.split(jax.random.key(0), 2)


def _tokens(key, temperature=1.0, **changes):
  arguments = {
    'prompts': _PROMPTS,
    'lengths': _LENGTHS,
    'model': _TARGET,
    'drafter': _DRAFTER,
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=temperature),
    'max_new_tokens': 5,
  }
  return specsample.generate(_PARAMS, key=key, **(arguments | changes)).tokens


@pytest.fixture(scope='module')
def expected():
  """The tokens [2, B, M] of plain calls."""
  return np.stack([_tokens(key) for key in _KEYS])


def _scanned(keys):
  return jax.lax.scan(lambda _, key: (None, _tokens(key)), None, keys)[1]


def _compiled(keys):
  return jnp.stack([_tokens(key) for key in keys])


@pytest.mark.parametrize(
  'transformed', [jax.vmap(_tokens), _scanned, jax.jit(_compiled)]
)
def test_tokens_are_those_of_plain_calls(transformed, expected):
  np.testing.assert_array_equal(transformed(_KEYS), expected)


def test_a_function_that_calls_it_has_a_gradient(expected):
  def loss(temperature):
    # As in a policy gradient: the tokens are data.
    return temperature * jnp.sum(_tokens(_KEYS[0], temperature))

  assert jax.grad(loss)(1.0) == expected[0].sum()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'prompts': _PROMPTS.astype(np.float32)}, 'prompts is of dtype float32'),
    ({'lengths': _LENGTHS[:1]}, r'lengths \(1,\): expected'),
    ({'request_ids': np.arange(3)}, r'request_ids is .* per prompt \[2\]'),
    ({'max_new_tokens': np.int32(5)}, 'max_new_tokens is .* not traced'),
  ],
)
def test_shapes_and_dtypes_are_checked_while_tracing(change, message):
  traced = jax.jit(lambda change: _tokens(_KEYS[0], **change))
  with pytest.raises(ValueError, match=message):
    traced(change)


def test_many_prompts_are_decoded_outside_of_jit():
  def tokens(key):
    outputs = specsample.generate_all(
      *(_PARAMS, [[1]], key),
      model=_TARGET,
      drafter=_DRAFTER,
      verify=verify.chain,
      sampling=specsample.Sampling(),
      max_new_tokens=1,
    )
    return next(outputs).tokens

  with pytest.raises(ValueError, match='call generate there'):
    jax.jit(tokens)(_KEYS[0])
