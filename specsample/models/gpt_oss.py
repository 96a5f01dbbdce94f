"""gpt-oss (OpenAI, 2508.10925): attention sinks, and experts with biases."""

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import parts
from specsample.models import transformer

_MLP = 'model.layers.{}.mlp.'
_FUSED = _MLP + 'experts.gate_up_proj'
_GATE, _UP = ' (gates)', ' (other inputs)'  # named so in messages
_NAMES = llama.NAMES | {
  'layers.{}.attention.sinks': 'model.layers.{}.self_attn.sinks',
  'layers.{}.mlp.router.kernel': _MLP + 'router.weight',
  'layers.{}.mlp.router.bias': _MLP + 'router.bias',
  'layers.{}.mlp.expert_gate.kernel': _FUSED + _GATE,
  'layers.{}.mlp.expert_gate.bias': _FUSED + '_bias' + _GATE,
  'layers.{}.mlp.expert_up.kernel': _FUSED + _UP,
  'layers.{}.mlp.expert_up.bias': _FUSED + '_bias' + _UP,
  'layers.{}.mlp.expert_down.kernel': _MLP + 'experts.down_proj',
  'layers.{}.mlp.expert_out_bias': _MLP + 'experts.down_proj_bias',
}
# Stored as [E, in, out], where gates and other inputs alternate.
_PARTS = {
  '.experts.gate_up_proj': {
    _GATE: parts.Part((2, 1, 0), axis=2, start=0, step=2),
    _UP: parts.Part((2, 1, 0), axis=2, start=1, step=2),
  },
  '.experts.gate_up_proj_bias': {
    _GATE: parts.Part((1, 0), axis=1, start=0, step=2),
    _UP: parts.Part((1, 0), axis=1, start=1, step=2),
  },
  '.experts.down_proj': {'': parts.Part((2, 1, 0))},
  '.experts.down_proj_bias': {'': parts.Part((1, 0))},
}
# The rope of a configuration that has none.
_ROPE = {
  'rope_type': 'yarn',
  'factor': 32.0,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'truncate': False,
  'original_max_position_embeddings': 4096,
}


def _gpt_oss(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config.only('hidden_act', 'silu')
  if config.get('rope_scaling') is None:
    config = config.filled({'rope_parameters': _ROPE})
  has_bias = config.flag('attention_bias')
  fields = llama.shape(config, dtype) | llama.rope(config, 150_000.0)
  return transformer.Transformer(
    **fields,
    attention_bias=has_bias,
    attention_out_bias=has_bias,
    has_sinks=True,
    has_wide_norms=True,
    sliding_window=config.size('sliding_window'),
    sliding_layers=_sliding_layers(config, fields['num_layers']),
    experts=experts.Experts(
      num_experts=config.size_of_one(
        *('num_local_experts', 'num_experts'), default=128
      ),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=fields['mlp_dim'],
      has_linear_biases=True,
      limit=config.number('swiglu_limit'),
      gate_scale=config.number('swiglu_alpha'),
    ),
  )


def _sliding_layers(config, num_layers):
  if config.get('layer_types') is not None:
    return llama.layers_of_kind(config, 'sliding_attention')
  return tuple(range(0, num_layers, 2))


GPT_OSS = family.Family(
  _gpt_oss,
  _NAMES,
  divided=lambda model, file: parts.divided(file, _PARTS),
  defaults={
    'num_key_value_heads': 8,
    'head_dim': 64,
    'rms_norm_eps': 1e-5,
    'max_position_embeddings': 131_072,
    'attention_bias': True,
    'sliding_window': 128,
    'num_experts_per_tok': 4,
    'swiglu_limit': 7.0,
    'swiglu_alpha': 1.702,
  },
)
