"""DeepSeek-V3 (2412.19437): latent attention, routed and shared experts."""

import numpy as np

from specsample.models import attention
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer

_NAMES = (
  llama.NAMES
  | llama.experts_names('mlp.')
  | llama.shared_names('mlp.shared_experts.')
  | family.of_layers(
    {
      'attention.query_in.kernel': 'self_attn.q_a_proj.weight',
      'attention.query_norm.scale': 'self_attn.q_a_layernorm.weight',
      'attention.key_value_in.kernel': 'self_attn.kv_a_proj_with_mqa.weight',
      'attention.key_value_norm.scale': 'self_attn.kv_a_layernorm.weight',
      'attention.key_value.kernel': 'self_attn.kv_b_proj.weight',
      'mlp.router_bias': 'mlp.gate.e_score_correction_bias',
    }
  )
)


def _deepseek_v3(config):
  # Latent attention has as many key-value heads as heads: take the defaults.
  config = config.changed({'num_key_value_heads': None, 'head_dim': None})
  fields = llama.shape(config) | llama.rope(config)
  latent = attention.Latent(
    kv_rank=config.size('kv_lora_rank'),
    rope_dim=config.size('qk_rope_head_dim'),
    head_dim=config.size('qk_nope_head_dim'),
    value_dim=config.size('v_head_dim'),
    query_rank=config.optional_size('q_lora_rank'),
  )
  hidden = config.size('moe_intermediate_size')
  num_dense = config.get('first_k_dense_replace', int)
  names = 'n_routed_experts', 'num_local_experts'
  return fields | {
    'latent': latent,
    'query_scale': _query_scale(latent, config),
    'experts': experts.Experts(
      num_experts=config.size_of_one(*names, default=256),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=hidden,
      dense_layers=tuple(
        i for i in range(fields['num_layers']) if i < num_dense
      ),
      scores='sigmoid',
      is_normalised=config.flag('norm_topk_prob'),
      scale=config.number('routed_scaling_factor'),
      has_bias=True,
      num_groups=config.size('n_group'),
      groups_per_token=config.size('topk_group'),
      shared_dim=hidden * config.size('n_shared_experts'),
    ),
  }


def _query_scale(latent, config):
  """Returns the query scale, times growth**2 if YaRN has mscale_all_dim."""
  rope = llama.rope_part(config)
  scale = (latent.head_dim + latent.rope_dim) ** -0.5
  weight = rope.get('mscale_all_dim', float, 0)
  is_plain = rope.of_one(str, 'rope_type', 'type') in (None, 'default')
  if is_plain or not weight:
    return scale
  growth = llama.yarn_growth(
    rope.number('factor'), rope.number('mscale_all_dim')
  )
  return scale * growth**2


def _parts(model: transformer.Transformer) -> tensors.Parts:
  """Orders the rotated rows as `rotary.rotate` expects them.

  They are the last ones of each head, stored as interleaved pairs. Queries are
  made of the input (q_proj), or of a vector that is made of it (q_b_proj).
  """
  latent = model.latent
  if latent is None:  # a target of another family than the folder's
    return {}
  found = {}
  for end, plain, count in (
    ('.q_proj.weight', latent.head_dim, model.num_heads),
    ('.q_b_proj.weight', latent.head_dim, model.num_heads),
    ('.kv_a_proj_with_mqa.weight', latent.kv_rank, 1),
  ):
    size = plain + latent.rope_dim
    pairs = np.arange(plain, size).reshape(-1, 2).T.reshape(-1)
    order = np.concatenate([np.arange(plain), pairs])
    rows = (np.arange(count)[:, None] * size + order).reshape(-1)
    own = end.replace('q_b_proj', 'q_proj')
    found[end] = {own: tensors.Part((0, 1), 0, rows)}
  return found


DEEPSEEK_V3 = family.Family(
  _deepseek_v3,
  _NAMES,
  _parts,
  defaults={
    'max_position_embeddings': 4096,
    'rms_norm_eps': 1e-6,
    'moe_intermediate_size': 2048,
    'n_shared_experts': 1,
    'routed_scaling_factor': 2.5,
    'kv_lora_rank': 512,
    'q_lora_rank': 1536,
    'qk_rope_head_dim': 64,
    'qk_nope_head_dim': 128,
    'v_head_dim': 128,
    'n_group': 8,
    'topk_group': 4,
    'num_experts_per_tok': 8,
    'first_k_dense_replace': 3,
    'norm_topk_prob': True,
    'rope_interleave': True,
  },
  only={
    'hidden_act': 'silu',
    'attention_bias': False,
    'scoring_func': 'sigmoid',
    'topk_method': 'noaux_tc',
    'moe_layer_freq': 1,
    'rope_interleave': True,
  },
)
