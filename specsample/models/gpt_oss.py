"""gpt-oss (OpenAI, 2508.10925): attention sinks, and experts with biases."""

from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer

_FUSED, _DOWN = 'mlp.experts.gate_up_proj', 'mlp.experts.down_proj'
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
    'mlp.expert_down.kernel': _DOWN,
    'mlp.expert_out_bias': _DOWN + '_bias',
  }
)
# The rope of a configuration that has none.
_ROPE = {
  'rope_type': 'yarn',
  'factor': 32.0,
  'beta_fast': 32.0,
  'beta_slow': 1.0,
  'truncate': False,
  'original_max_position_embeddings': 4096,
}


def _gpt_oss(config):
  if config.get('rope_scaling', dict) is None:
    config = config.filled({'rope_parameters': _ROPE})
  fields = llama.shape(config) | llama.rope(config, 150_000.0)
  sliding = llama.layers_of_kind(
    config, 'sliding_attention', range(0, fields['num_layers'], 2)
  )
  names = 'num_local_experts', 'num_experts'
  return {
    **fields,
    **llama.biases(config),
    'has_sinks': True,
    'has_wide_norms': True,
    'sliding_window': config.size('sliding_window'),
    'sliding_layers': sliding,
    'experts': experts.Experts(
      num_experts=config.size_of_one(*names, default=128),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=fields['mlp_dim'],
      has_linear_biases=True,
      limit=config.number('swiglu_limit'),
      gate_scale=config.number('swiglu_alpha'),
    ),
  }


def _parts(model: transformer.Transformer) -> tensors.Parts:
  """Divides matrices [E, in, out], whose gates and other inputs alternate."""
  assert model.experts is not None
  size, found = model.experts.mlp_dim, {}
  for end, order in (('', (2, 1, 0)), ('_bias', (1, 0))):
    axis, whole = order[0], f'{_FUSED}{end}'
    found[whole] = {
      whole + _GATE: tensors.Part(order, axis, range(0, 2 * size, 2)),
      whole + _UP: tensors.Part(order, axis, range(1, 2 * size, 2)),
    }
    found[_DOWN + end] = {_DOWN + end: tensors.Part(order)}
  return found


GPT_OSS = family.Family(
  _gpt_oss,
  _NAMES,
  parts=_parts,
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
