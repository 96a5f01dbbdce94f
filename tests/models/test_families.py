"""Every family against `transformers` on random tiny models."""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import specsample
from specsample import drafters
from specsample import verify
from specsample.models import config as config_lib
from specsample.models import decoder_layer
from specsample.models import huggingface
from specsample.models import layers

_SIZES = {
  'vocab_size': 131,
  'hidden_size': 32,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'intermediate_size': 48,
  'max_position_embeddings': 256,
  # Large enough that the logits tell a wrong model from a right one.
  'initializer_range': 0.3,
}
_OWN_HEADS = _SIZES | {'head_dim': 12}
_EXPERTS = {'num_experts_per_tok': 2, 'moe_intermediate_size': 20}
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 16,
  'rope_theta': 1_000.0,
}
_GEMMA4 = _OWN_HEADS | {
  'global_head_dim': 16,
  'sliding_window': 7,
  'final_logit_softcapping': 6.0,
  'rope_parameters': {
    'full_attention': {
      'rope_type': 'proportional',
      'partial_rotary_factor': 0.25,
      'rope_theta': 1_000.0,
    },
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
  },
}
_SHARED4 = {
  'num_hidden_layers': 5,
  'layer_types': [
    'sliding_attention',
    *['sliding_attention', 'full_attention'] * 2,
  ],
  'num_kv_shared_layers': 2,
  'use_double_wide_mlp': True,
  'hidden_size_per_layer_input': 8,
  'vocab_size_per_layer_input': 131,
}
_KEYS_AS_VALUES = {
  'attention_k_eq_v': True,
  'num_global_key_value_heads': 1,
  'hidden_size_per_layer_input': 0,
}
_LATENT = {
  'q_lora_rank': 20,
  'kv_lora_rank': 16,
  'qk_rope_head_dim': 8,
  'qk_nope_head_dim': 10,
  'v_head_dim': 6,
  'n_routed_experts': 8,
  'n_group': 4,
  'topk_group': 2,
  'first_k_dense_replace': 1,
  'n_shared_experts': 2,
  'num_key_value_heads': 4,
  'num_nextn_predict_layers': 0,
}
# Three of four layers are recurrent.
_RECURRENT = _SIZES | {
  'num_hidden_layers': 4,
  'initializer_range': 0.2,
  'head_dim': 16,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 6,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'layer_types': [
    *('linear_attention', 'linear_attention'),
    *('full_attention', 'linear_attention'),
  ],
  'rope_parameters': {
    'rope_type': 'default',
    'rope_theta': 1_000.0,
    'partial_rotary_factor': 0.5,
    'mrope_section': [2, 1, 1],
  },
}
_RECURRENT_EXPERTS = _EXPERTS | {
  'num_experts': 6,
  'shared_expert_intermediate_size': 28,
}
_CONFIGS = {
  'llama': transformers.LlamaConfig(**_SIZES),
  'llama_tied': transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
  'llama_one_head_each': transformers.LlamaConfig(
    **_SIZES | {'num_key_value_heads': 4, 'rms_norm_eps': 1e-3}
  ),
  'llama_biased': transformers.LlamaConfig(**_SIZES, attention_bias=True),
  'llama_wide_heads': transformers.LlamaConfig(**_OWN_HEADS),
  'llama_linear': transformers.LlamaConfig(
    **_SIZES,
    rope_parameters={
      'rope_type': 'linear',
      'factor': 4.0,
      'rope_theta': 5_000.0,
    },
  ),
  'llama3': transformers.LlamaConfig(
    **_SIZES,
    rope_parameters={
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 64,
      'rope_theta': 500.0,
    },
  ),
  'mistral': transformers.MistralConfig(**_SIZES, sliding_window=7),
  'mistral_no_window': transformers.MistralConfig(
    **_SIZES, sliding_window=None
  ),
  'mixtral': transformers.MixtralConfig(
    **_SIZES, num_local_experts=4, num_experts_per_tok=2
  ),
  'qwen2': transformers.Qwen2Config(**_SIZES),
  'qwen2_yarn': transformers.Qwen2Config(**_SIZES, rope_parameters=_YARN),
  'qwen2_window': transformers.Qwen2Config(
    **_SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
  ),
  'qwen3': transformers.Qwen3Config(**_OWN_HEADS, tie_word_embeddings=True),
  'qwen3_biased': transformers.Qwen3Config(**_OWN_HEADS, attention_bias=True),
  'qwen3_moe': transformers.Qwen3MoeConfig(
    **_OWN_HEADS, **_EXPERTS, num_experts=6, mlp_only_layers=[1]
  ),
  'qwen3_moe_normalised': transformers.Qwen3MoeConfig(
    **_OWN_HEADS,
    **_EXPERTS,
    num_experts=4,
    norm_topk_prob=True,
    decoder_sparse_step=2,
  ),
  'qwen3_5': transformers.Qwen3_5TextConfig(
    **_RECURRENT, tie_word_embeddings=True
  ),
  'qwen3_5_moe': transformers.Qwen3_5MoeTextConfig(
    **{k: v for k, v in _RECURRENT.items() if k != 'intermediate_size'},
    **_RECURRENT_EXPERTS,
  ),
  'qwen3_next': transformers.Qwen3NextConfig(
    **_RECURRENT, **_RECURRENT_EXPERTS, mlp_only_layers=[1]
  ),
  'gemma2': transformers.Gemma2Config(
    **_OWN_HEADS,
    sliding_window=7,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=6.0,
  ),
  'gemma3': transformers.Gemma3TextConfig(
    **_OWN_HEADS | {'num_hidden_layers': 4},
    sliding_window=7,
    query_pre_attn_scalar=20,
    sliding_window_pattern=3,
    rope_parameters={
      'full_attention': {
        'rope_type': 'linear',
        'factor': 8.0,
        'rope_theta': 1_000.0,
      },
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
    },
  ),
  'gemma4': transformers.Gemma4TextConfig(**_GEMMA4 | _SHARED4),
  'gemma4_keys_as_values': transformers.Gemma4TextConfig(
    **_GEMMA4 | _KEYS_AS_VALUES | {'num_hidden_layers': 4},
    layer_types=['sliding_attention'] * 2 + ['full_attention'] * 2,
  ),
  'gemma4_experts': transformers.Gemma4TextConfig(
    **_GEMMA4 | _KEYS_AS_VALUES,
    layer_types=['sliding_attention'] * 2 + ['full_attention'],
    enable_moe_block=True,
    num_experts=6,
    top_k_experts=2,
    moe_intermediate_size=20,
  ),
  'gpt_oss': transformers.GptOssConfig(
    **_OWN_HEADS | {'head_dim': 8, 'intermediate_size': 24},
    sliding_window=7,
    num_local_experts=6,
    num_experts_per_tok=2,
    rope_parameters=_YARN | {'truncate': False},
    # Few gates or other inputs of so small a model reach the usual limit.
    swiglu_limit=1.0,
  ),
  'deepseek_v3': transformers.DeepseekV3Config(
    **_SIZES | _LATENT | _EXPERTS,
    rope_parameters=_YARN | {'mscale': 1.0, 'mscale_all_dim': 0.7},
  ),
  'deepseek_v3_plain_queries': transformers.DeepseekV3Config(
    **_SIZES
    | _LATENT
    | _EXPERTS
    | {'q_lora_rank': None, 'n_group': 1, 'topk_group': 1},
    norm_topk_prob=False,
  ),
}
_BATCH, _LENGTH = 2, 48


@pytest.fixture(scope='module', autouse=True)
def _one_torch_thread():
  """Uses one torch thread: several busy-wait, even if others need the cores."""
  before = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(before)


def _reference(name):
  """Returns a random transformers model with nontrivial norms and biases."""
  torch.manual_seed(0)
  config = _CONFIGS[name]
  config._attn_implementation = 'eager'
  config._experts_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  named = [*model.named_parameters(), *model.named_buffers()]
  with torch.no_grad():
    for key, value in named:
      if 'norm' in key:
        begin = 0.5 - (value.mean() < 0.5).item()
        value.uniform_(begin, begin + 1)
      elif 'bias' in key:
        value.uniform_(-0.5, 0.5)
      elif key.endswith(('layer_scalar', 'router.scale', 'expert_scale')):
        value.uniform_(0.5, 1.5)
      elif 'sinks' in key:
        value.normal_()
      elif 'experts.' in key or key.endswith('gate.weight'):
        value.normal_(0, 0.3)
  return model


@pytest.fixture(scope='module', params=list(_CONFIGS))
def pair(request, tmp_path_factory):
  """A loaded model, its parameters, and what transformers computes."""
  folder = tmp_path_factory.mktemp(request.param)
  reference = _reference(request.param)
  reference.save_pretrained(folder)
  tokens = torch.randint(0, _SIZES['vocab_size'], (_BATCH, _LENGTH))
  with torch.no_grad():
    outputs = reference(tokens, output_hidden_states=True)
  loaded = specsample.load(folder)
  return loaded.model, loaded.params, tokens.numpy(), outputs


def _apply(model):
  return jax.jit(model.apply, static_argnames='features')


def _close(found, expected, model):
  # Norms of small queries and keys amplify rounding: so far, transformers'
  # own logits differ between a prefill and one token at a time.
  atol = 1e-3 if model.is_recurrent else 1e-4
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_prefill_equals_transformers(pair):
  model, params, tokens, outputs = pair
  logits = outputs.logits.numpy()
  assert np.std(logits) > 0.5
  cache = model.init_cache(_BATCH, _LENGTH)
  found, _ = _apply(model)(params, tokens, cache, features=(-1, 0, 1))
  _close(found.logits, logits, model)
  _close(found.hidden, outputs.hidden_states[-1].numpy(), model)
  for feature, entering in zip(
    found.features, outputs.hidden_states[:3], strict=True
  ):
    _close(feature, entering.numpy(), model)


def test_decoding_over_wrong_drafts_equals_transformers(pair):
  model, params, tokens, outputs = pair
  apply, fed = _apply(model), 3
  cache = model.init_cache(_BATCH, _LENGTH + 2, max_new=fed)
  has_window = model.sliding_window is not None
  assert bool(cache.rings) == has_window
  lengths = np.asarray([0, 4])
  _, cache = apply(params, tokens[:, :fed], cache)
  cache = model.commit(cache, jnp.asarray([0, fed]))
  _, cache = apply(params, np.roll(tokens, -fed, 1)[:, :fed], cache)
  cache = model.commit(cache, jnp.asarray(lengths))
  rows = np.arange(_BATCH)
  while lengths.max() < _LENGTH:
    inputs = np.stack([tokens[rows, lengths]] * fed, axis=1)
    inputs[:, 1:] = (inputs[:, 1:] + 5 + lengths[:, None]) % model.vocab_size
    found, cache = apply(params, inputs, cache)
    _close(found.logits[:, 0], outputs.logits.numpy()[rows, lengths], model)
    lengths = lengths + 1
    cache = model.commit(cache, jnp.asarray(lengths))


@pytest.mark.parametrize(
  'pair', ['gemma4', 'gpt_oss', 'qwen3_5'], indirect=True
)
def test_300_tokens_with_drafts_are_those_of_a_plain_loop(pair):
  model, params, tokens, _ = pair
  model, prompts = dataclasses.replace(model, max_length=320), tokens[:, :5]

  @jax.jit
  def plain(params):
    cache = model.init_cache(_BATCH, 320, max_new=5)
    output, cache = model.apply(params, prompts, cache)
    first = output.logits[:, -1].argmax(-1)
    cache = model.commit(cache, jnp.full(_BATCH, 5))

    def step(carry, length):
      token, cache = carry
      output, cache = model.apply(params, token[:, None], cache)
      cache = model.commit(cache, jnp.full(_BATCH, length + 1))
      return (output.logits[:, 0].argmax(-1), cache), token

    _, found = jax.lax.scan(step, (first, cache), 5 + jnp.arange(300))
    return found.T

  output = specsample.generate(
    {'target': params},
    *(prompts, np.full(_BATCH, 5), jax.random.key(0)),
    model=model,
    drafter=drafters.Ngram(num_draft_tokens=4, min_ngram=1),
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=300,
  )
  np.testing.assert_array_equal(output.tokens, plain(params))
  stats = specsample.stats.summarize(output)
  assert 0 < stats.kept < stats.judged


def test_embed_and_unembed_are_the_ends_of_the_network(pair):
  model, params, tokens, outputs = pair
  embedded = model.embed(params, jnp.asarray(tokens))
  _close(embedded, outputs.hidden_states[0].numpy(), model)
  last = jnp.asarray(outputs.hidden_states[-1].numpy())
  _close(model.unembed(params, last), outputs.logits.numpy(), model)


def test_rows_of_deepseek_that_are_no_pairs_are_refused(tmp_path):
  config = transformers.DeepseekV3Config(
    **_SIZES | _LATENT | _EXPERTS, rope_interleave=False
  )
  config.save_pretrained(tmp_path)
  with pytest.raises(
    ValueError, match='rope_interleave is False, but only True is'
  ):
    specsample.load(tmp_path)


def _model_of(name, changes):
  values = _CONFIGS[name].to_dict() | changes
  config = config_lib.Config(values, 'config.json')
  return huggingface.family_of(config).model(config, 'float32')


def test_a_first_windowed_layer_that_is_no_number_is_refused():
  changes = {'max_window_layers': '28', 'layer_types': None}
  with pytest.raises(
    ValueError, match="max_window_layers is '28', expected an integer"
  ):
    _model_of('qwen2_window', changes)


@pytest.mark.parametrize(
  ('name', 'reference'),
  [
    ('gpt_oss', modeling_gpt_oss.GptOssRMSNorm),
    ('gemma4', modeling_gemma4.Gemma4RMSNorm),
    ('llama', modeling_llama.LlamaRMSNorm),
  ],
)
def test_norms_round_to_bfloat16_where_transformers_does(name, reference):
  model = dataclasses.replace(_model_of(name, {}), dtype='bfloat16')
  keys = layers.random_keys(jax.random.key(0))
  made = decoder_layer.DecoderLayer(model, keys, 0)
  norms = [x for _, x in nnx.iter_graph(made) if isinstance(x, layers.RMSNorm)]
  assert len(norms) > 1
  assert {x.is_wide for x in norms} == {name != 'llama'}
  rng = np.random.default_rng(0)
  rows, scale = rng.normal(size=(64, 32)), rng.uniform(0.5, 1.5, size=32)
  theirs = reference(32, eps=model.norm_eps).to(torch.bfloat16)
  norm = layers.norm_of(model, 32)
  rows, scale = (torch.tensor(x, dtype=torch.bfloat16) for x in (rows, scale))
  with torch.no_grad():
    theirs.weight.copy_(scale)
    expected = theirs(rows).float().numpy()
  as_jax = lambda x: jnp.asarray(x.float().numpy(), jnp.bfloat16)
  norm.scale.set_value(as_jax(scale))
  found = np.asarray(norm(as_jax(rows)), np.float32)
  # Rounded in another place, some 30% would differ.
  assert (found != expected).mean() < 0.01


@pytest.mark.parametrize('name', ['qwen3_moe', 'qwen3_5_moe'])
@pytest.mark.parametrize('value', [1, '1', [True], ['1']])
def test_dense_layers_that_are_no_list_of_numbers_are_refused(name, value):
  with pytest.raises(
    ValueError, match=r'mlp_only_layers is .* expected a list of integers'
  ):
    _model_of(name, {'mlp_only_layers': value})


def test_counts_of_layers_stay_within_the_model():
  """Otherwise a damaged one would be counted through, and fill the memory."""
  changes = {'max_window_layers': -5, 'layer_types': None}
  assert _model_of('qwen2_window', changes).sliding_layers == (0, 1, 2)
  experts = _model_of('deepseek_v3', {'first_k_dense_replace': 9}).experts
  assert experts.dense_layers == (0, 1, 2)


def test_a_cap_of_null_is_none():
  caps = ('attn_logit_softcapping', 'final_logit_softcapping')
  model = _model_of('gemma2', dict.fromkeys(caps))
  assert model.attention_softcap is None and model.logit_softcap is None


@pytest.mark.parametrize(
  ('given', 'expected'), [(40_960, 131_072), (200_000, 200_000)]
)
def test_yarn_extends_the_longest_text(given, expected):
  scaling = {
    'rope_type': 'yarn',
    'factor': 4.0,
    'original_max_position_embeddings': 32_768,
  }
  changes = {'rope_scaling': scaling, 'rope_parameters': None}
  model = _model_of('qwen3', {**changes, 'max_position_embeddings': given})
  assert model.max_length == expected
