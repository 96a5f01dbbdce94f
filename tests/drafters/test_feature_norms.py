"""Drafters that join the features of several layers bring them to one scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing

_TARGET = testing.tiny_llama(vocab_size=12, num_layers=3)
_LAYERS = (-1, 1, 2)
_KINDS = (drafters.DFlash, drafters.DSpark, drafters.Eagle3)
_each = pytest.mark.parametrize('kind', _KINDS)


def _make(kind, has_feature_norms=True):
  drafter = kind(
    model=_TARGET,
    num_draft_tokens=3,
    feature_layers=_LAYERS,
    has_feature_norms=has_feature_norms,
  )
  target = testing.with_noise(
    _TARGET.init(jax.random.key(0)), jax.random.key(1)
  )
  own = drafter.init_params(jax.random.key(2), target)
  return drafter, {'target': target, 'drafter': own}


def _read(drafter, params, features):
  """Returns the arrays that the drafter computes from features [1, T, D]."""
  if isinstance(drafter, drafters.Eagle3):
    return [drafter.features(params, features[0], features)]
  network = drafter.merge(params)
  keys, values = network.context(
    features, jnp.arange(features[0].shape[1])[None]
  )
  return [*keys, *values]


@_each
def test_norms_of_a_target_with_an_offset_begin_alike(kind):
  """Gemma's norms scale by 1 + parameter, a drafter's by the parameter."""
  model = dataclasses.replace(_TARGET, norm_offset=1.0)
  target = testing.with_noise(model.init(jax.random.key(0)), jax.random.key(1))
  drafter = kind(
    model=model,
    num_draft_tokens=3,
    feature_layers=_LAYERS,
    has_feature_norms=True,
  )
  own = drafter.init_params(jax.random.key(2), target)
  expected = 1 + target['norm']['scale']
  np.testing.assert_array_equal(own['norm']['scale'], expected)
  last = own['feature_norms']['norms'][2]
  np.testing.assert_array_equal(last['scale'], expected)


def _features():
  keys = jax.random.split(jax.random.key(3), len(_LAYERS))
  return tuple(jax.random.normal(key, (1, 5, _TARGET.dim)) for key in keys)


@_each
def test_they_begin_as_the_norms_that_the_target_reads_with(kind):
  _, params = _make(kind)
  target = params['target']
  readers = [
    target['layers'][0]['attention_norm'],
    target['layers'][2]['attention_norm'],
    target['norm'],
  ]
  scales = [reader['scale'] for reader in readers]
  assert len({float(scale[0]) for scale in scales}) == len(scales)
  norms = params['drafter']['feature_norms']['norms']
  for i, scale in enumerate(scales):
    np.testing.assert_array_equal(norms[i]['scale'], scale)


@_each
def test_a_features_scale_does_not_matter(kind):
  features = _features()
  larger = (features[0], 100 * features[1], features[2])
  drafter, params = _make(kind)
  for a, b in zip(
    _read(drafter, params, features),
    _read(drafter, params, larger),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@_each
def test_without_norms_it_does(kind):
  features = _features()
  larger = (features[0], 100 * features[1], features[2])
  drafter, params = _make(kind, has_feature_norms=False)
  assert not jax.tree.leaves(params['drafter'].get('feature_norms', {}))
  before = _read(drafter, params, features)[0]
  assert np.abs(_read(drafter, params, larger)[0] - before).max() > 0.1
