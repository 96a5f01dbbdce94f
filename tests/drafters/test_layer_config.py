"""Drafters whose layers have another shape than their target's."""

import dataclasses

import jax
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.models import attention
from specsample.models import experts

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


@pytest.mark.nightly
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


@pytest.mark.nightly(but=('eagle3',))
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


_LAYER = experts.Experts(
  num_experts=4, num_per_token=2, mlp_dim=8, dense_layers=(0,)
)
_LATENT = attention.Latent(kv_rank=12, rope_dim=4, head_dim=6, value_dim=5)
_SPARSE = dataclasses.replace(
  testing.tiny_llama(),
  num_kv_heads=4,
  head_dim=4,
  experts=_LAYER,
  latent=_LATENT,
  query_scale=0.3,
)
_SOME = {'model': _SPARSE, 'num_draft_tokens': 2}
_OF_SPARSE = {
  'hydra++': drafters.Hydra(prefix_attention=True, **_SOME),
  'dflash': drafters.DFlash(feature_layers=(0,), num_layers=1, **_SOME),
  'dspark': drafters.DSpark(feature_layers=(0,), num_layers=1, rank=4, **_SOME),
  'eagle': drafters.Eagle(**_SOME),
  'draft model': drafters.DraftModel(layers=(1, 0), **_SOME),
}


@pytest.mark.nightly(but=('draft model',))
@pytest.mark.parametrize('name', _OF_SPARSE)
def test_drafters_of_latent_vectors_and_experts(name):
  drafter = _OF_SPARSE[name]
  target = _SPARSE.init(jax.random.key(0))
  own = drafter.init_params(jax.random.key(1), target)
  jax.tree.map(
    lambda leaf, expected: np.testing.assert_equal(leaf.shape, expected.shape),
    own,
    drafter.abstract_params(),
  )
  params = {'target': target, 'drafter': own}
  state = specsample.prefill(
    Decoder(_SPARSE, drafter, specsample.verify.chain),
    params,
    np.asarray([[5, 17, 4, 1], [3, 9, 0, 0]]),
    np.asarray([4, 2]),
    jax.random.key(2),
    sampling=specsample.Sampling(temperature=1.0),
    max_new_tokens=4,
  )
  draft, _ = step.propose(
    Decoder(_SPARSE, drafter, specsample.verify.chain), params, state
  )
  assert np.all(draft.tokens >= 0)
  np.testing.assert_allclose(draft.probs.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize('name', ['hydra++', 'dflash', 'dspark', 'eagle'])
def test_their_own_layers_have_neither(name):
  shape = _OF_SPARSE[name].shape
  assert (shape.latent, shape.experts, shape.query_scale) == (None,) * 3
  assert (shape.num_kv_heads, shape.head_dim, shape.mlp_dim) == (4, 4, 32)


_WIDE = dataclasses.replace(_MODEL, dim=24)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: dataclasses.replace(_DRAFTERS['eagle'], layer_config=_WIDE),
      'layer_config has vectors of 24 numbers, but those of the target have '
      '16: give a layer_config',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['dflash'], layer_config=_WIDE),
      'layer_config has vectors of 24 numbers',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['mtp'], layer_config='llama'),
      'MTP has layers with the shape of llama, which is not a Transformer: '
      'choose',
    ),
    (
      lambda: drafters.DFlash(
        model=dataclasses.replace(_SPARSE, head_dim=3),
        num_draft_tokens=2,
        feature_layers=(0,),
      ),
      'DFlash has layers with a head_dim of 3, .* give a layer_config',
    ),
    (
      lambda: dataclasses.replace(_DRAFTERS['hydra++'], prefix_attention=False),
      'layer_config and has_prefix_norm belong to the prefix layer: set',
    ),
  ],
)
def test_shapes_that_do_not_fit_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
