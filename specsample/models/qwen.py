"""The Qwen family: Qwen 2.5 (2412.15115), Qwen 3 and its mixture of experts.

Yang et al., 2505.09388.
"""

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import transformer

_EXPERTS = 'model.layers.{}.mlp.experts.*.'
_MOE_NAMES = llama.NAMES | {
  'layers.{}.mlp.router.kernel': 'model.layers.{}.mlp.gate.weight',
  'layers.{}.mlp.expert_gate.kernel': _EXPERTS + 'gate_proj.weight',
  'layers.{}.mlp.expert_up.kernel': _EXPERTS + 'up_proj.weight',
  'layers.{}.mlp.expert_down.kernel': _EXPERTS + 'down_proj.weight',
}


def _fields(config, dtype):
  config.only('hidden_act', 'silu')
  fields = llama.shape(config, dtype) | llama.rope(config)
  if config.flag('use_sliding_window'):
    fields |= {
      'sliding_window': llama.window(config),
      'sliding_layers': sliding_layers(config, fields['num_layers']),
    }
  return fields


def sliding_layers(
  config: config_lib.Config, num_layers: int
) -> tuple[int, ...]:
  """Returns the layers with a window in a model that uses windows."""
  kinds = config.get('layer_types')
  if kinds is None:
    first = config.get('max_window_layers', 28)
    return tuple(i for i in range(num_layers) if i >= first)
  return llama.layers_of_kind(config, 'sliding_attention')


def dense_layers(config: config_lib.Config) -> tuple[int, ...]:
  """Returns the layers without experts in a model that has experts."""
  step = config.size('decoder_sparse_step', 1)
  dense = config.get('mlp_only_layers', [])
  layers = range(config.layers('num_hidden_layers'))
  return tuple(i for i in layers if i in dense or (i + 1) % step)


def _qwen2(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  return transformer.Transformer(**_fields(config, dtype), attention_bias=True)


def _qwen3_fields(config, dtype):
  has_bias = config.flag('attention_bias')
  return _fields(config, dtype) | {
    'qk_norm': True,
    'attention_bias': has_bias,
    'attention_out_bias': has_bias,
  }


def _qwen3(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  return transformer.Transformer(**_qwen3_fields(config, dtype))


def _qwen3_moe(
  config: config_lib.Config, dtype: str
) -> transformer.Transformer:
  # Unlike Qwen 3, it has a window in all layers or in none.
  fields = _qwen3_fields(config, dtype) | {'sliding_layers': None}
  return transformer.Transformer(
    **fields,
    experts=experts.Experts(
      # transformers 5 writes num_local_experts.
      num_experts=config.size_of_one(
        *('num_experts', 'num_local_experts'), default=128
      ),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=config.size('moe_intermediate_size'),
      is_normalised=config.flag('norm_topk_prob'),
      dense_layers=dense_layers(config),
    ),
  )


_DEFAULTS = llama.DEFAULTS | {
  'num_key_value_heads': 32,
  'max_position_embeddings': 32_768,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_MOE_DEFAULTS = _DEFAULTS | {
  'num_key_value_heads': 4,
  'num_experts_per_tok': 8,
  'moe_intermediate_size': 768,
}
QWEN2 = family.Family(_qwen2, llama.NAMES, defaults=_DEFAULTS)
QWEN3 = family.Family(
  _qwen3, llama.NAMES, defaults=_DEFAULTS | {'head_dim': 128}
)
QWEN3_MOE = family.Family(_qwen3_moe, _MOE_NAMES, defaults=_MOE_DEFAULTS)
