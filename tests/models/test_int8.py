"""Matrices of 8-bit integers in place of parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample.models import attention
from specsample.models import checkpoint
from specsample.models import experts
from specsample.models import int8

_LLAMA = testing.tiny_llama(vocab_size=40, num_layers=2)
_TOKENS = np.random.default_rng(0).integers(40, size=(2, 24))


@functools.partial(jax.jit, static_argnames='model')
def _logits_of(params, tokens, *, model):
  cache = model.init_cache(*tokens.shape)
  return model.apply(params, tokens, cache)[0].logits


def _logits(params, *, model):
  return _logits_of(params, _TOKENS, model=model)


def _dequantised(params):
  is_leaf = lambda x: isinstance(x, int8.Int8)
  whole = lambda x: x.values * x.scale if is_leaf(x) else x
  return jax.tree.map(whole, params, is_leaf=is_leaf)


def _bytes(tree):
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'tie_embeddings': True, 'embedding_scale': 4.0},
    {
      'latent': attention.Latent(
        kv_rank=12, rope_dim=4, head_dim=6, value_dim=5
      )
    },
    {'experts': experts.Experts(num_experts=3, num_per_token=2, mlp_dim=8)},
    {
      'experts': experts.Experts(
        num_experts=2, num_per_token=1, mlp_dim=8, shared_dim=4
      )
    },
  ],
)
def test_a_model_is_that_of_the_rounded_matrices(changes):
  model = dataclasses.replace(_LLAMA, **changes)
  exact = jax.tree.map(lambda x: 1.6 * x, model.init(jax.random.key(0)))
  params = int8.weights(exact)
  # An embedding that no product reads stays as it is.
  is_int8 = lambda leaf: isinstance(leaf, int8.Int8)
  assert is_int8(params['embedding']) == model.tie_embeddings
  assert is_int8(params.get('unembedding')) != model.tie_embeddings
  out = params['layers'][1]['attention']['out']['kernel']
  assert out.values.dtype == jnp.int8 and out.scale.shape == (1, model.dim)
  assert params['norm']['scale'].dtype == jnp.float32
  found = _logits(params, model=model)
  rounded = _logits(_dequantised(params), model=model)
  # Mostly within 1e-5, but 1.3e-4 on processors that add in another order.
  np.testing.assert_allclose(found, rounded, atol=5e-4)
  expected = _logits(exact, model=model)
  error = np.sqrt(np.mean((found - expected) ** 2))
  assert 0 < error < 0.2 * np.std(expected)


def test_axes_are_those_of_the_parameters():
  sparse = experts.Experts(num_experts=3, num_per_token=2, mlp_dim=8)
  model = dataclasses.replace(_LLAMA, experts=sparse)
  params = jax.eval_shape(int8.weights, model.abstract_params())
  axes = int8.axes(model.param_axes(), model.abstract_params())
  is_axes = lambda x: isinstance(x, tuple)
  ranks = jax.tree.map(len, axes, is_leaf=is_axes)
  assert jax.tree.map(lambda x: x.ndim, params) == ranks


def test_shapes_are_of_no_mesh():
  # Shapes are cached, so this is a size that no other test asks for.
  model = dataclasses.replace(_LLAMA, vocab_size=41)
  for explicit in (True, False):
    with jax.set_mesh(sharding.make_mesh(explicit=explicit)):
      params = model.abstract_params()
      rounded = jax.eval_shape(int8.weights, params)
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(params))
    assert rounded['unembedding'].values.shape == (model.dim, 41)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with a model, and a drafter that was trained for it."""
  folder = tmp_path_factory.mktemp('int8')
  params = _LLAMA.init(jax.random.key(0))
  checkpoint.save(folder / 'model', _LLAMA, params)
  target = specsample.load(folder / 'model')
  drafter = drafters.Medusa(model=_LLAMA, num_draft_tokens=2)
  own = drafter.init_params(jax.random.key(1), target.params)
  specsample.save_drafter(
    folder / 'drafter', drafter, own, target=target, card={}
  )
  return folder


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_loading_quantises(saved, dtype):
  exact = specsample.load(saved / 'model', dtype=dtype)
  found = specsample.load(saved / 'model', dtype=dtype, weights='int8')
  assert found.model == exact.model
  jax.tree.map(
    np.testing.assert_array_equal, found.params, int8.weights(exact.params)
  )
  matrices = _bytes(exact.params) - _bytes(found.params)
  assert matrices > 0.35 * _bytes(exact.params)


def test_drafters_are_loaded_for_it_and_decode(saved):
  target = specsample.load(saved / 'model', weights='int8')
  assert target.fingerprint == specsample.load(saved / 'model').fingerprint
  loaded = specsample.load_drafter(saved / 'drafter', target, weights='int8')
  prompts, lengths = specsample.pad_prompts([[1, 2, 3], [4]])
  generate = lambda drafter, own: specsample.generate(
    {'target': target.params} | own,
    *(prompts, lengths, jax.random.key(0)),
    model=target.model,
    drafter=drafter,
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(),
    max_new_tokens=12,
    stop=specsample.Stop(),
  )
  plain = generate(drafters.NoDraft(), {})
  leaves = {leaf.dtype for leaf in jax.tree.leaves(loaded.params)}
  assert jnp.dtype('int8') in leaves
  drafted = generate(loaded.drafter, {'drafter': loaded.params})
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)


def test_a_draft_model_begins_as_layers_of_int8():
  params = int8.weights(_LLAMA.init(jax.random.key(0)))
  drafter = drafters.DraftModel(model=_LLAMA, num_draft_tokens=2, layers=(1,))
  own = drafter.init_params(jax.random.key(1), params)
  whole = _dequantised(_LLAMA.keep_params(params, (1,)))
  jax.tree.map(np.testing.assert_array_equal, own['layers'], whole['layers'])


def test_heads_with_an_unembedding_of_int8_draft():
  target = _LLAMA.init(jax.random.key(0))
  drafter = drafters.Medusa(
    model=_LLAMA, num_draft_tokens=2, own_unembedding=True
  )
  shapes = drafter.abstract_params()
  own = jax.tree.map(lambda x: jnp.full(x.shape, 0.1, x.dtype), shapes)
  exact, rounded = (
    drafter.head_logits(
      {'target': target, 'drafter': each}, 1, jnp.ones((2, _LLAMA.dim))
    )
    for each in (own, int8.weights(own))
  )
  np.testing.assert_allclose(rounded, exact, rtol=1e-2)


@pytest.mark.nightly
def test_smollm2_stays_close_to_what_it_was(smollm2):
  rounded = specsample.load('smollm2-135m-instruct', weights='int8')
  text = 'The sun rises in the east and sets in the west. Water boils at 100'
  tokens = jnp.asarray([smollm2.tokenizer.encode(text)])
  exact, found = (
    jax.nn.log_softmax(_logits_of(loaded.params, tokens, model=smollm2.model))
    for loaded in (smollm2, rounded)
  )
  divergence = jnp.sum(jnp.exp(exact) * (exact - found), axis=-1)
  assert 1e-4 < divergence.mean() < 0.02  # on many prompts .007
  assert jnp.mean(exact.argmax(-1) == found.argmax(-1)) > 0.85


def test_matrices_of_int8_are_not_saved(saved, tmp_path):
  target = specsample.load(saved / 'model', weights='int8')
  message = r'attention\.\w+\.kernel.* in int8.*weights=None'
  with pytest.raises(ValueError, match=message):
    checkpoint.save(tmp_path / 'model', target.model, target.params)
  loaded = specsample.load_drafter(saved / 'drafter', target)
  with pytest.raises(ValueError, match=r'heads.*kernel.* in int8'):
    specsample.save_drafter(
      tmp_path / 'drafter',
      loaded.drafter,
      int8.weights(loaded.params),
      target=target,
      card={},
    )
  assert not list(tmp_path.iterdir())


def test_other_weights_are_refused(saved):
  with pytest.raises(ValueError, match=r"weights is 'int4'.*'int8'"):
    specsample.load(saved / 'model', weights='int4')
  target = specsample.load(saved / 'model')
  with pytest.raises(ValueError, match=r"weights is 'int4'.*'int8'"):
    specsample.load_drafter(saved / 'drafter', target, weights='int4')
