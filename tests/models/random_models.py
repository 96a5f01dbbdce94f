"""Tiny random models of every family, made by `transformers`."""

import torch
import transformers

SIZES = {
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
OWN_HEADS = SIZES | {'head_dim': 12}
EXPERTS = {'num_experts_per_tok': 2, 'moe_intermediate_size': 20}
_YARN = {
  'rope_type': 'yarn',
  'factor': 4.0,
  'original_max_position_embeddings': 16,
  'rope_theta': 1_000.0,
}
_GEMMA4 = OWN_HEADS | {
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
LATENT = {
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
_RECURRENT = SIZES | {
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
_RECURRENT_EXPERTS = EXPERTS | {
  'num_experts': 6,
  'shared_expert_intermediate_size': 28,
}
CONFIGS = {
  'llama': transformers.LlamaConfig(**SIZES),
  'llama_tied': transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
  'llama_one_head_each': transformers.LlamaConfig(
    **SIZES | {'num_key_value_heads': 4, 'rms_norm_eps': 1e-3}
  ),
  'llama_biased': transformers.LlamaConfig(**SIZES, attention_bias=True),
  'llama_wide_heads': transformers.LlamaConfig(**OWN_HEADS),
  'llama_linear': transformers.LlamaConfig(
    **SIZES,
    rope_parameters={
      'rope_type': 'linear',
      'factor': 4.0,
      'rope_theta': 5_000.0,
    },
  ),
  'llama3': transformers.LlamaConfig(
    **SIZES,
    rope_parameters={
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 64,
      'rope_theta': 500.0,
    },
  ),
  'mistral': transformers.MistralConfig(**SIZES, sliding_window=7),
  'mistral_no_window': transformers.MistralConfig(**SIZES, sliding_window=None),
  'mixtral': transformers.MixtralConfig(
    **SIZES, num_local_experts=4, num_experts_per_tok=2
  ),
  'qwen2': transformers.Qwen2Config(**SIZES),
  'qwen2_yarn': transformers.Qwen2Config(**SIZES, rope_parameters=_YARN),
  'qwen2_window': transformers.Qwen2Config(
    **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1
  ),
  'qwen3': transformers.Qwen3Config(**OWN_HEADS, tie_word_embeddings=True),
  'qwen3_biased': transformers.Qwen3Config(**OWN_HEADS, attention_bias=True),
  'qwen3_moe': transformers.Qwen3MoeConfig(
    **OWN_HEADS, **EXPERTS, num_experts=6, mlp_only_layers=[1]
  ),
  # It has a window in all layers, whatever max_window_layers says.
  'qwen3_moe_window': transformers.Qwen3MoeConfig(
    **OWN_HEADS,
    **EXPERTS,
    num_experts=4,
    use_sliding_window=True,
    sliding_window=7,
    max_window_layers=1,
  ),
  'qwen3_moe_normalised': transformers.Qwen3MoeConfig(
    **OWN_HEADS,
    **EXPERTS,
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
    **OWN_HEADS,
    sliding_window=7,
    query_pre_attn_scalar=20,
    attn_logit_softcapping=4.0,
    final_logit_softcapping=6.0,
  ),
  'gemma3': transformers.Gemma3TextConfig(
    **OWN_HEADS | {'num_hidden_layers': 4},
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
    **OWN_HEADS | {'head_dim': 8, 'intermediate_size': 24},
    sliding_window=7,
    num_local_experts=6,
    num_experts_per_tok=2,
    rope_parameters=_YARN | {'truncate': False},
    # Few gates or other inputs of so small a model reach the usual limit.
    swiglu_limit=1.0,
  ),
  'deepseek_v3': transformers.DeepseekV3Config(
    **SIZES | LATENT | EXPERTS,
    rope_parameters=_YARN | {'mscale': 1.0, 'mscale_all_dim': 0.7},
  ),
  'deepseek_v3_plain_queries': transformers.DeepseekV3Config(
    **SIZES
    | LATENT
    | EXPERTS
    | {'q_lora_rank': None, 'n_group': 1, 'topk_group': 1},
    norm_topk_prob=False,
  ),
}


def reference(name):
  """Returns a random transformers model with nontrivial norms and biases."""
  torch.manual_seed(0)
  config = CONFIGS[name]
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
