"""DeepSeek-V3 (2412.19437): latent attention, routed and shared experts."""

import dataclasses
import re

import numpy as np

from specsample.models import attention
from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer

_ATTENTION = 'model.layers.{}.self_attn.'
_MLP = 'model.layers.{}.mlp.'
_NAMES = llama.NAMES | {
  'layers.{}.attention.query_in.kernel': _ATTENTION + 'q_a_proj.weight',
  'layers.{}.attention.query_norm.scale': _ATTENTION + 'q_a_layernorm.weight',
  'layers.{}.attention.key_value_in.kernel': (
    _ATTENTION + 'kv_a_proj_with_mqa.weight'
  ),
  'layers.{}.attention.key_value_norm.scale': (
    _ATTENTION + 'kv_a_layernorm.weight'
  ),
  'layers.{}.attention.key_value.kernel': _ATTENTION + 'kv_b_proj.weight',
  'layers.{}.mlp.router.kernel': _MLP + 'gate.weight',
  'layers.{}.mlp.router_bias': _MLP + 'gate.e_score_correction_bias',
  'layers.{}.mlp.expert_gate.kernel': _MLP + 'experts.*.gate_proj.weight',
  'layers.{}.mlp.expert_up.kernel': _MLP + 'experts.*.up_proj.weight',
  'layers.{}.mlp.expert_down.kernel': _MLP + 'experts.*.down_proj.weight',
  'layers.{}.mlp.shared.gate.kernel': _MLP + 'shared_experts.gate_proj.weight',
  'layers.{}.mlp.shared.up.kernel': _MLP + 'shared_experts.up_proj.weight',
  'layers.{}.mlp.shared.down.kernel': _MLP + 'shared_experts.down_proj.weight',
}


def _deepseek_v3(
  config: config_lib.Config, dtype: str
) -> transformer.Transformer:
  for key, supported in (
    ('hidden_act', 'silu'),
    ('attention_bias', False),
    ('scoring_func', 'sigmoid'),
    ('topk_method', 'noaux_tc'),
    ('moe_layer_freq', 1),
    ('rope_interleave', True),
  ):
    config.only(key, supported)
  # Latent attention has as many key-value heads as heads: take the defaults.
  values = dict(config.values) | {'num_key_value_heads': None, 'head_dim': None}
  config = config_lib.Config(values, config.origin)
  fields = llama.shape(config, dtype) | llama.rope(config)
  latent = attention.Latent(
    kv_rank=config.size('kv_lora_rank'),
    rope_dim=config.size('qk_rope_head_dim'),
    head_dim=config.size('qk_nope_head_dim'),
    value_dim=config.size('v_head_dim'),
    query_rank=(
      None if config.get('q_lora_rank') is None else config.size('q_lora_rank')
    ),
  )
  hidden = config.size('moe_intermediate_size')
  num_dense = config.get('first_k_dense_replace')
  return transformer.Transformer(
    **fields,
    latent=latent,
    query_scale=_query_scale(latent, config),
    experts=experts.Experts(
      num_experts=config.size_of_one(
        'n_routed_experts', 'num_local_experts', default=256
      ),
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
  )


def _query_scale(latent, config):
  """Returns the query scale, times growth**2 if YaRN has mscale_all_dim."""
  rope = llama.rope_part(config)
  scale = (latent.head_dim + latent.rope_dim) ** -0.5
  weight = rope.get('mscale_all_dim', 0)
  if rope.of_one('rope_type', 'type') in (None, 'default'):
    return scale
  if not weight:
    return scale
  growth = llama.yarn_growth(
    rope.number('factor'), rope.number('mscale_all_dim')
  )
  return scale * growth**2


def _own_name(name):
  """Returns the name in `_NAMES`, where q_b_proj is called q_proj.

  Queries are made of the input (q_proj), or of a vector that is made of it.
  """
  return family.own_name(name.replace('.q_b_proj.', '.q_proj.'))


@dataclasses.dataclass(frozen=True)
class _Split:
  """A tensor whose rotated rows are stored as interleaved pairs.

  They are the last `rope_dim` of every `size` rows. Reading puts the first rows
  of all pairs before the second rows.
  """

  tensor: tensors.Tensor
  num_rows: int
  size: int
  rope_dim: int

  def __getitem__(self, index: tensors.Index, /) -> np.ndarray:
    whole = self.tensor[(slice(None),) * len(index)]
    begin = self.size - self.rope_dim
    pairs = np.arange(begin, self.size).reshape(-1, 2).T.reshape(-1)
    order = np.concatenate([np.arange(begin), pairs])
    starts = np.arange(0, self.num_rows, self.size)
    return whole[(starts[:, None] + order).reshape(-1)][index]


def _rearranged(
  model: transformer.Transformer, name: str, tensor: tensors.Tensor
) -> tensors.Tensor:
  """Orders the rotated rows as `rotary.rotate` expects them."""
  latent = model.latent
  assert latent is not None
  match = re.search(r'\.(q_proj|kv_a_proj_with_mqa)\.', name)
  if match is None:
    return tensor
  size, count = latent.kv_rank + latent.rope_dim, 1
  if match[1] == 'q_proj':
    size, count = latent.head_dim + latent.rope_dim, model.num_heads
  return _Split(tensor, size * count, size, latent.rope_dim)


DEEPSEEK_V3 = family.Family(
  _deepseek_v3,
  _NAMES,
  _own_name,
  _rearranged,
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
)
