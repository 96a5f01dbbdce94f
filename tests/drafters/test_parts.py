"""Layers of their own shape, norms of features, and draft vocabularies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample.drafters import vocabulary
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.models import attention
from specsample.models import experts
from tests.drafters import rounds

_MODEL = testing.tiny_llama(num_layers=5)
_OTHER = dataclasses.replace(
  _MODEL, num_heads=2, num_kv_heads=1, head_dim=6, mlp_dim=24, rope_theta=50.0
)
_MAKE = {'model': _MODEL, 'num_draft_tokens': 2, 'layer_config': _OTHER}


@pytest.mark.parametrize(
  'drafter',
  [
    drafters.Eagle(**_MAKE),
    drafters.Eagle3(**_MAKE),
    drafters.MTP(**_MAKE),
    drafters.DFlash(feature_layers=(1,), **_MAKE),
    drafters.Hydra(prefix_attention=True, **_MAKE),
  ],
  ids=lambda drafter: type(drafter).__name__,
)
def test_parameters_and_caches_have_the_shape_of_the_drafters_layers(drafter):
  own = drafter.abstract_params()
  shapes = {x.shape for x in jax.tree.leaves(own)}
  assert (16, 24) in shapes and (24, 16) in shapes  # the feed-forward
  assert (12, 16) in shapes  # two heads of 6 numbers
  params = {'target': _MODEL.init(jax.random.key(0)), 'drafter': own}
  state = jax.eval_shape(lambda params: drafter.init(params, 1, 32), params)
  cached = [x.shape for x in jax.tree.leaves(state) if x.ndim == 4]
  assert cached and {(1, 1, 32, 6)} == set(cached)


_SPARSE = dataclasses.replace(
  testing.tiny_llama(),
  num_kv_heads=4,
  head_dim=4,
  experts=experts.Experts(
    num_experts=4, num_per_token=2, mlp_dim=8, dense_layers=(0,)
  ),
  latent=attention.Latent(kv_rank=12, rope_dim=4, head_dim=6, value_dim=5),
  query_scale=0.3,
)
_SOME = {'model': _SPARSE, 'num_draft_tokens': 2}
_OF_SPARSE = {
  'hydra++': drafters.Hydra(prefix_attention=True, **_SOME),
  'dflash': drafters.DFlash(feature_layers=(0,), num_layers=1, **_SOME),
  'eagle': drafters.Eagle(**_SOME),
  'draft model': drafters.DraftModel(layers=(1, 0), **_SOME),
}


@pytest.mark.slow
@pytest.mark.nightly(but=('draft model',))
@pytest.mark.parametrize('name', _OF_SPARSE)
def test_target_of_latent_vectors_and_experts_has_drafts(name):
  drafter = _OF_SPARSE[name]
  target = _SPARSE.init(jax.random.key(0))
  own = drafter.init_params(jax.random.key(1), target)
  jax.tree.map(
    lambda leaf, expected: np.testing.assert_equal(leaf.shape, expected.shape),
    own,
    drafter.abstract_params(),
  )
  params = {'target': target, 'drafter': own}
  decoder = Decoder(_SPARSE, drafter, specsample.verify.chain)
  state = specsample.prefill(
    decoder,
    params,
    np.asarray([[5, 17, 4, 1], [3, 9, 0, 0]]),
    np.asarray([4, 2]),
    jax.random.key(2),
    sampling=specsample.Sampling(temperature=1.0),
    max_new_tokens=4,
  )
  draft, _ = step.propose(decoder, params, state)
  assert np.all(draft.tokens >= 0)
  np.testing.assert_allclose(draft.probs.sum(axis=-1), 1, rtol=1e-5)
  if name != 'draft model':  # layers of their own have neither
    shape = drafter.shape
    assert (shape.latent, shape.experts, shape.query_scale) == (None,) * 3
    assert (shape.num_kv_heads, shape.head_dim, shape.mlp_dim) == (4, 4, 32)


_LAYERS = (-1, 1, 2)
_each_reader = pytest.mark.parametrize(
  'kind', [drafters.DFlash, drafters.DSpark, drafters.Eagle3]
)


def _reader(kind, has_feature_norms=True, **changes):
  """Returns a drafter that joins the features of three layers, and params."""
  model = dataclasses.replace(rounds.TARGET, **changes)
  drafter = kind(
    model=model,
    num_draft_tokens=3,
    feature_layers=_LAYERS,
    has_feature_norms=has_feature_norms,
  )
  target = testing.with_noise(model.init(jax.random.key(0)), jax.random.key(1))
  own = drafter.init_params(jax.random.key(2), target)
  return drafter, {'target': target, 'drafter': own}


@_each_reader
def test_norms_of_a_target_with_an_offset_begin_alike(kind):
  """Gemma's norms scale by 1 + parameter, a drafter's by the parameter."""
  _, params = _reader(kind, norm_offset=1.0)
  own, expected = params['drafter'], 1 + params['target']['norm']['scale']
  np.testing.assert_array_equal(own['norm']['scale'], expected)
  last = own['feature_norms']['norms'][2]
  np.testing.assert_array_equal(last['scale'], expected)


@_each_reader
def test_feature_norms_begin_as_those_that_the_target_reads_with(kind):
  _, params = _reader(kind)
  target = params['target']
  scales = [
    target['layers'][0]['attention_norm']['scale'],
    target['layers'][2]['attention_norm']['scale'],
    target['norm']['scale'],
  ]
  assert len({float(scale[0]) for scale in scales}) == len(scales)
  norms = params['drafter']['feature_norms']['norms']
  for i, scale in enumerate(scales):
    np.testing.assert_array_equal(norms[i]['scale'], scale)


@pytest.mark.parametrize('has_norms', [True, False])
@_each_reader
def test_scale_of_a_feature_matters_only_without_norms(kind, has_norms):
  drafter, params = _reader(kind, has_norms)
  norms = params['drafter'].get('feature_norms', {})
  assert bool(jax.tree.leaves(norms)) == has_norms

  def read(features):
    if kind is drafters.Eagle3:
      return drafter.features(params, features[0], features)
    places = jnp.arange(features[0].shape[1])[None]
    return drafter.merge(params).context(features, places)

  keys = jax.random.split(jax.random.key(3), len(_LAYERS))
  first, second, third = (
    jax.random.normal(key, (1, 5, rounds.TARGET.dim)) for key in keys
  )
  plain = jax.tree.leaves(read((first, second, third)))
  scaled = jax.tree.leaves(read((first, 100 * second, third)))
  for x, y in zip(plain, scaled, strict=True):
    if has_norms:
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
    else:
      assert np.abs(x - y).max() > 0.1


@pytest.mark.parametrize(
  'drafter',
  [
    drafters.DFlash(
      model=rounds.TARGET, num_draft_tokens=3, feature_layers=(0,)
    ),
    drafters.Eagle3(model=rounds.TARGET, num_draft_tokens=3),
    drafters.MTP(model=rounds.TARGET, num_draft_tokens=3, num_modules=2),
  ],
  ids=lambda drafter: type(drafter).__name__,
)
def test_last_norm_begins_as_the_targets(drafter):
  scale = np.arange(16.0)
  target = rounds.target_params() | {'norm': {'scale': scale}}
  own = drafter.init_params(jax.random.key(0), target)
  modules = (
    own['layers'].values() if isinstance(drafter, drafters.MTP) else [own]
  )
  for module in modules:
    np.testing.assert_array_equal(module['norm']['scale'], scale)


def test_draft_vocabulary_has_columns_and_cap_of_the_targets_logits():
  model = dataclasses.replace(rounds.TARGET, logit_softcap=0.5)
  d2t, target = rounds.D2T, model.init(jax.random.key(0))
  drafter = drafters.Medusa(
    model=model, num_draft_tokens=3, draft_vocab_size=d2t.size
  )
  own = drafter.init_params(jax.random.key(1), target, d2t)
  np.testing.assert_array_equal(own['vocabulary']['d2t'], d2t)
  np.testing.assert_allclose(
    own['vocabulary']['unembedding'], target['unembedding'][:, d2t], atol=1e-6
  )
  params = {'target': target, 'drafter': own}
  vectors = 2 * jax.random.normal(jax.random.key(2), (2, 3, model.dim))
  expected = model.unembed(target, vectors)[..., d2t]
  found = drafter.logits(params, vectors)
  assert 0.4 < np.abs(found).max() < 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5)
  # A drafter that was trained elsewhere has no cap, as in its own training.
  published = drafters.Eagle(
    model=model, num_draft_tokens=3, own_unembedding=True
  )
  assert vocabulary.make(published).softcap is None
