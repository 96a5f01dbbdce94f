"""Drafters whose layers are of another shape than their target's."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing

_MODEL = testing.tiny_llama(num_layers=5)
_OTHER = dataclasses.replace(
  _MODEL, num_heads=2, num_kv_heads=1, head_dim=6, mlp_dim=24, rope_theta=50.0
)
_DRAFTERS = {
  'eagle': drafters.Eagle(
    model=_MODEL, num_draft_tokens=2, layer_config=_OTHER
  ),
  'eagle3': drafters.Eagle3(
    model=_MODEL, num_draft_tokens=2, layer_config=_OTHER
  ),
  'mtp': drafters.MTP(model=_MODEL, num_draft_tokens=2, layer_config=_OTHER),
  'dflash': drafters.DFlash(
    model=_MODEL, num_draft_tokens=2, feature_layers=(1,), layer_config=_OTHER
  ),
  'hydra++': drafters.Hydra(
    model=_MODEL, num_draft_tokens=2, prefix_attention=True, layer_config=_OTHER
  ),
}


@pytest.mark.parametrize('name', _DRAFTERS)
def test_parameters_and_caches_have_that_shape(name):
  drafter = _DRAFTERS[name]
  target = _MODEL.init(jax.random.key(0))
  own = drafter.init_params(jax.random.key(1), target)
  shapes = {x.shape for x in jax.tree.leaves(own)}
  assert (16, 24) in shapes and (24, 16) in shapes  # the feed-forward
  assert (12, 16) in shapes  # two heads of 6 numbers
  state = drafter.init({'target': target, 'drafter': own}, 1, 32)
  cached = [x.shape for x in jax.tree.leaves(state) if x.ndim == 4]
  assert cached and {(1, 1, 32, 6)} == set(cached)


@pytest.mark.parametrize('name', ['eagle3', 'dflash', 'hydra++'])
def test_greedy_text_is_the_targets(name):
  drafter = _DRAFTERS[name]
  target = _MODEL.init(jax.random.key(0))
  own = testing.with_noise(
    drafter.init_params(jax.random.key(1), target), jax.random.key(2)
  )
  testing.assert_greedy_equal(
    {'target': target, 'drafter': own},
    np.asarray([[5, 17, 4, 1], [3, 9, 0, 0]]),
    np.asarray([4, 2]),
    model=_MODEL,
    drafter=drafter,
    verify=specsample.verify.chain,
    max_new_tokens=6,
  )


_WIDE = dataclasses.replace(_MODEL, dim=24)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: dataclasses.replace(_DRAFTERS['eagle'], layer_config=_WIDE),
      'layer_config has vectors of 24 numbers and the target of 16: a drafter',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['dflash'], layer_config=_WIDE),
      'layer_config has vectors of 24 numbers',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['mtp'], layer_config='llama'),
      'MTP has layers of the shape of llama, which is no Transformer: choose',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['hydra++'], prefix_attention=False),
      'layer_config and has_prefix_norm are of the prefix layer: set',
    ),
  ],
)
def test_shapes_that_do_not_fit_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
