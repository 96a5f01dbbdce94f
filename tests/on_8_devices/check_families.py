"""Sharded models with every kind of layer give the unsharded tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tokenizers

import specsample
from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample import text
from specsample.models import attention
from specsample.models import experts
from specsample.models import gated_delta
from specsample.models import int8
from tests.on_8_devices import small

# More than 256 tokens, so that they are drawn in two steps.
_LLAMA = small.target(320, num_layers=2)
_EXPERTS = experts.Experts(num_experts=6, num_per_token=2, mlp_dim=16)
_MODELS = {
  'gemma': dataclasses.replace(
    _LLAMA,
    tie_embeddings=True,
    qk_norm=True,
    activation='gelu_tanh',
    norm_offset=1.0,
    has_post_norms=True,
    embedding_scale=5.6,
    attention_softcap=20.0,
    logit_softcap=10.0,
    sliding_window=3,
    sliding_layers=(0,),
    sliding_rope_theta=100.0,
    num_tokens=300,
  ),
  'gemma4': dataclasses.replace(
    _LLAMA,
    num_layers=5,
    tie_embeddings=True,
    embedding_scale=5.6,
    sliding_window=3,
    sliding_layers=(0, 1, 3),
    full_head_dim=12,
    full_kv_heads=1,
    values_are_keys=True,
    has_value_norm=True,
    has_post_norms=True,
    num_shared=2,
    shared_mlp_dim=96,
    layer_input_dim=8,
    has_layer_scalars=True,
    experts=dataclasses.replace(_EXPERTS, is_beside_mlp=True),
  ),
  'gpt_oss': dataclasses.replace(
    _LLAMA,
    attention_bias=True,
    attention_out_bias=True,
    has_sinks=True,
    sliding_window=3,
    sliding_layers=(0,),
    experts=dataclasses.replace(_EXPERTS, has_linear_biases=True, limit=1.0),
  ),
  # Fewer key heads than devices, so that value heads are divided too.
  'qwen3_5': dataclasses.replace(
    _LLAMA,
    tie_embeddings=True,
    # Most tokens are repeated, so that n-grams are found.
    embedding_scale=5.6,
    delta=gated_delta.Delta(
      layers=(0,), num_key_heads=2, num_value_heads=8, key_dim=8, value_dim=6
    ),
    has_output_gate=True,
    rotary_dim=4,
    norm_offset=1.0,
    experts=dataclasses.replace(_EXPERTS, shared_dim=24, has_shared_gate=True),
  ),
  'mixtral': dataclasses.replace(_LLAMA, experts=_EXPERTS),
  'deepseek': dataclasses.replace(
    _LLAMA,
    num_kv_heads=8,
    latent=attention.Latent(
      kv_rank=12, rope_dim=4, head_dim=6, value_dim=5, query_rank=10
    ),
    experts=dataclasses.replace(
      _EXPERTS,
      dense_layers=(0,),
      scores='sigmoid',
      has_bias=True,
      num_groups=3,
      groups_per_token=2,
      shared_dim=24,
    ),
  ),
}
_INT8 = ('gemma', 'gpt_oss', 'deepseek', 'qwen3_5')
_PROMPTS, _LENGTHS = specsample.pad_prompts(
  [[1, 2, 3, 1, 2, 3, 4, 1, 2], [5], [7, 8, 7]]
)


def _generate(params, model):
  return jax.device_get(
    specsample.generate(
      {'target': params},
      *(_PROMPTS, _LENGTHS, jax.random.key(0)),
      model=model,
      drafter=drafters.Ngram(num_draft_tokens=3, min_ngram=1),
      verify=specsample.verify.block,
      # Likely tokens recur, so that n-grams are found.
      sampling=specsample.Sampling(
        temperature=np.asarray([0.0, 0.3, 1.0]), top_k=50
      ),
      max_new_tokens=12,
    )
  )


@functools.cache
def _on_one_device(name, is_int8):
  """Returns the model, its parameters and their axes, and the tokens."""
  model = dataclasses.replace(_MODELS[name], has_int8_cache=is_int8)
  params, axes = model.init(jax.random.key(0)), model.param_axes()
  params = testing.with_noise(params, jax.random.key(1))
  if is_int8:
    axes = int8.axes(axes, params)
    params = int8.weights(params)
  params = jax.device_get(params)
  expected = _generate(params, model)
  assert specsample.stats.summarize(expected).kept
  return model, params, axes, expected


@pytest.mark.nightly(but=('deepseek-True-shape1-False',))
@pytest.mark.parametrize(
  ('shape', 'explicit'), [((2, 4), True), ((1, 8), False)]
)
@pytest.mark.parametrize(
  ('name', 'is_int8'),
  [*((name, False) for name in _MODELS), *((name, True) for name in _INT8)],
)
def test_tokens_are_those_of_one_device(name, is_int8, shape, explicit):
  model, params, axes, expected = _on_one_device(name, is_int8)
  with jax.set_mesh(sharding.make_mesh(*shape, explicit=explicit)):
    found = _generate(sharding.place(params, axes), model)
  small.assert_same(found, expected)


@pytest.mark.parametrize('size', [280, 400])
@pytest.mark.parametrize('explicit', [True, False])
def test_a_vocabulary_is_matched_on_the_mesh(explicit, size):
  target, draft = _LLAMA, dataclasses.replace(_LLAMA, vocab_size=size)
  backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, 'unknown'))
  tokenizer = text.Tokenizer(backend=backend, named_tokens={})
  load = lambda model: specsample.Loaded(
    model,
    sharding.place(model.init(jax.random.key(0)), model.param_axes()),
    tokenizer,
  )
  with jax.set_mesh(sharding.make_mesh(2, 4, explicit=explicit)):
    matched = specsample.match_vocabulary(load(draft), load(target))
    axes = matched.model.param_axes()
    for name in ('embedding', 'unembedding'):
      assert matched.params[name].sharding == sharding.from_axes(*axes[name])
      assert matched.params[name].shape == (32, 320)
