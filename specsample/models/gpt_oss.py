"""gpt-oss (OpenAI, 2508.10925): attention sinks, and experts with biases."""

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer

_FUSED = 'mlp.experts.gate_up_proj'
_GATE, _UP = ' (gates)', ' (other inputs)'  # named so in messages
_NAMES = llama.NAMES | family.of_layers(
  {
    'attention.sinks': 'self_attn.sinks',
    'mlp.router.kernel': 'mlp.router.weight',
    'mlp.router.bias': 'mlp.router.bias',
    'mlp.expert_gate.kernel': _FUSED + _GATE,
    'mlp.expert_gate.bias': _FUSED + '_bias' + _GATE,
    'mlp.expert_up.kernel': _FUSED + _UP,
    'mlp.expert_up.bias': _FUSED + '_bias' + _UP,
    'mlp.expert_down.kernel': 'mlp.experts.down_proj',
    'mlp.expert_out_bias': 'mlp.experts.down_proj_bias',
  }
)
# Stored as [E, in, out], where gates and other inputs alternate.
_PARTS = {
  '.experts.gate_up_proj': {
    _GATE: tensors.Part((2, 1, 0), axis=2, start=0, step=2),
    _UP: tensors.Part((2, 1, 0), axis=2, start=1, step=2),
  },
  '.experts.gate_up_proj_bias': {
    _GATE: tensors.Part((1, 0), axis=1, start=0, step=2),
    _UP: tensors.Part((1, 0), axis=1, start=1, step=2),
  },
  '.experts.down_proj': {'': tensors.Part((2, 1, 0))},
  '.experts.down_proj_bias': {'': tensors.Part((1, 0))},
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
  if config.get('rope_scaling') is None:
    config = config.filled({'rope_parameters': _ROPE})
  has_bias = config.flag('attention_bias')
  fields = llama.shape(config, dtype) | llama.rope(config, 150_000.0)
  sliding = tuple(range(0, fields['num_layers'], 2))
  if config.get('layer_types') is not None:
    sliding = llama.layers_of_kind(config, 'sliding_attention')
  names = 'num_local_experts', 'num_experts'
  return transformer.Transformer(
    **fields,
    attention_bias=has_bias,
    attention_out_bias=has_bias,
    has_sinks=True,
    has_wide_norms=True,
    sliding_window=config.size('sliding_window'),
    sliding_layers=sliding,
    experts=experts.Experts(
      num_experts=config.size_of_one(*names, default=128),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=fields['mlp_dim'],
      has_linear_biases=True,
      limit=config.number('swiglu_limit'),
      gate_scale=config.number('swiglu_alpha'),
    ),
  )


GPT_OSS = family.Family(
  _gpt_oss,
  _NAMES,
  divided=lambda model, file: tensors.divided(file.tensors(), _PARTS),
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
