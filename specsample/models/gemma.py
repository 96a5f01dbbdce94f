"""The Gemma family, text only: Gemma 2 (2408.00118), 3 (2503.19786) and 4."""

import dataclasses
import math
from typing import Any

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import llama
from specsample.models import rotary
from specsample.models import tensors
from specsample.models import transformer

_NAMES = llama.NAMES | family.of_layers(
  {
    'attention_post_norm.scale': 'post_attention_layernorm.weight',
    'mlp_norm.scale': 'pre_feedforward_layernorm.weight',
    'mlp_post_norm.scale': 'post_feedforward_layernorm.weight',
  }
)


def fields(dim: int) -> dict[str, Any]:
  """Returns the `Transformer` fields that both generations share."""
  return {
    'activation': 'gelu_tanh',
    'norm_offset': 1.0,
    'has_post_norms': True,
    'embedding_scale': math.sqrt(dim),
  }


_DEFAULTS = llama.DEFAULTS | {
  'tie_word_embeddings': True,
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
}


def _shape(config, step):
  """Returns the fields that both generations share.

  Every `step`-th layer has no window, if the configuration does not say.
  """
  shape = llama.shape(config)
  step = config.size('sliding_window_pattern', step)
  return {
    **shape,
    **fields(shape['dim']),
    **llama.biases(config),
    'query_scale': config.number('query_pre_attn_scalar') ** -0.5,
    'attention_softcap': config.optional_number('attn_logit_softcapping'),
    'logit_softcap': config.optional_number('final_logit_softcapping'),
    'sliding_window': config.size('sliding_window'),
    'sliding_layers': _sliding_layers(config, shape['num_layers'], step),
  }


def _local_theta(of_kinds):
  """Returns rope_theta of the layers with a window."""
  key = 'sliding_attention'
  local = llama.rope_of(of_kinds.part(key))
  if local['rope_scaling'] is not None:
    raise of_kinds.unexpected(key, 'a rope that is not scaled')
  return local['rope_theta']


def _sliding_layers(config, num_layers, step):
  default = llama.all_but_every(step, num_layers)
  return llama.layers_of_kind(config, 'sliding_attention', default)


def _gemma2(config):
  return _shape(config, step=2) | llama.rope(config)


def _gemma3(config):
  return _shape(config, step=6) | _gemma3_rope(config) | {'qk_norm': True}


def _gemma3_rope(config):
  """Returns the rope's fields; transformers 5 writes them per layer type."""
  new, theta = config.part('rope_parameters'), 1_000_000.0
  old_name = 'rope_local_base_freq'
  if not new.has('full_attention'):
    local_theta = config.number(old_name, 10_000.0)
    full = llama.rope(config, theta)
  else:
    local_theta = _local_theta(new)
    full = llama.rope_of(new.part('full_attention'), theta)
    # The names that earlier versions had for the same.
    config.only('rope_scaling', None)
    for key, theta in (
      ('rope_theta', full['rope_theta']),
      (old_name, local_theta),
    ):
      config.agreed(
        {key: config.get(key, float), 'that of rope_parameters': theta}
      )
  return full | {'sliding_rope_theta': local_theta}


_ACTIVATION = {'hidden_activation': 'gelu_pytorch_tanh'}
_ONLY = _ACTIVATION | {'use_bidirectional_attention': False}
GEMMA2 = family.Family(
  _gemma2,
  _NAMES,
  only=_ONLY,
  defaults=_DEFAULTS
  | {
    'max_position_embeddings': 8192,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
  },
)
GEMMA3 = family.Family(
  _gemma3,
  _NAMES,
  # transformers reads attn_logit_softcapping and does not apply it.
  only=_ONLY | {'attn_logit_softcapping': None},
  defaults=_DEFAULTS
  | {'vocab_size': 262_208, 'max_position_embeddings': 131_072},
)
_FUSED = 'experts.gate_up_proj'
_GATE, _UP = ' (gates)', ' (other inputs)'  # named so in messages
_NAMES4 = (
  _NAMES
  | {
    'layer_inputs.table': 'model.embed_tokens_per_layer.weight',
    'layer_inputs.project.kernel': 'model.per_layer_model_projection.weight',
    'layer_inputs.norm.scale': 'model.per_layer_projection_norm.weight',
  }
  | family.of_layers(
    {
      'scalar': 'layer_scalar',
      'inputs.gate.kernel': 'per_layer_input_gate.weight',
      'inputs.out.kernel': 'per_layer_projection.weight',
      'inputs.norm.scale': 'post_per_layer_input_norm.weight',
      'beside.mlp_norm.scale': 'post_feedforward_layernorm_1.weight',
      'beside.norm_before.scale': 'pre_feedforward_layernorm_2.weight',
      'beside.norm_after.scale': 'post_feedforward_layernorm_2.weight',
      'beside.experts.router.kernel': 'router.proj.weight',
      'beside.experts.router_scale': 'router.scale',
      'beside.experts.router_factors': 'router.per_expert_scale',
      'beside.experts.expert_gate.kernel': _FUSED + _GATE,
      'beside.experts.expert_up.kernel': _FUSED + _UP,
      'beside.experts.expert_down.kernel': 'experts.down_proj',
    }
  )
)
_ROPE4 = {
  'sliding_attention': {'rope_type': 'default', 'rope_theta': 10_000.0},
  'full_attention': {
    'rope_type': 'proportional',
    'rope_theta': 1_000_000.0,
    'partial_rotary_factor': 0.25,
  },
}


def _gemma4(config):
  # Text is causal; images may not be.
  if config.values.get('use_bidirectional_attention') != 'vision':
    config.only('use_bidirectional_attention', None)
  shape = llama.shape(config)
  num_layers = shape['num_layers']
  sliding = _sliding_layers(config, num_layers, step=6)
  # The last layer never has one.
  sliding = tuple(i for i in sliding if i < num_layers - 1)
  key = 'hidden_size_per_layer_input'
  has_inputs = config.get(key, int) not in (None, 0)
  if has_inputs:
    config.only('vocab_size_per_layer_input', shape['vocab_size'])
  num_shared = config.get('num_kv_shared_layers', int, 0)
  if num_shared not in range(num_layers):
    raise config.unexpected(
      'num_kv_shared_layers', f'an integer from 0 to {num_layers - 1}'
    )
  is_wide = config.flag('use_double_wide_mlp')
  return {
    **shape,
    **_rope4(config),
    **_full_sizes(config, sliding, num_layers),
    'activation': 'gelu_tanh',
    'has_wide_norms': True,
    'has_post_norms': True,
    'embedding_scale': math.sqrt(shape['dim']),
    'logit_softcap': config.optional_number('final_logit_softcapping'),
    'qk_norm': True,
    'query_scale': 1.0,
    'sliding_window': config.size('sliding_window'),
    'sliding_layers': sliding,
    'values_are_keys': config.flag('attention_k_eq_v'),
    'has_value_norm': True,
    'num_shared': num_shared,
    'shared_mlp_dim': 2 * shape['mlp_dim'] if is_wide else None,
    'layer_input_dim': config.size(key) if has_inputs else 0,
    'has_layer_scalars': True,
    'experts': _experts4(config) if config.flag('enable_moe_block') else None,
  }


def _full_sizes(config, sliding, num_layers):
  """Returns the sizes of the layers without a window.

  transformers has written them by layer since version 5.15.
  """
  if config.get('per_layer_config', dict) is None:
    of_all = config.size('num_key_value_heads')
    own = config.size('num_global_key_value_heads', of_all)
    return {
      'full_head_dim': config.size('global_head_dim', 512),
      'full_kv_heads': own if config.flag('attention_k_eq_v') else of_all,
    }
  by_layer = config.part('per_layer_config').values
  full = [i for i in range(num_layers) if i not in sliding]
  listed = ', '.join(map(str, full))
  # The keys are as wide as the largest: '05', '11'.
  given = {int(i) if i.isdecimal() else i: x for i, x in by_layer.items()}
  sizes = given.get(full[0])
  if given != dict.fromkeys(full, sizes) or not isinstance(sizes, dict):
    raise config.unexpected(
      'per_layer_config',
      f'the same sizes for the layers {listed} and no others',
    )
  sizes = config_lib.Config(sizes, config.origin)
  return {
    'full_head_dim': sizes.size('head_dim', config.size('head_dim')),
    'full_kv_heads': sizes.size(
      'num_key_value_heads', config.size('num_key_value_heads')
    ),
  }


def _rope4(config):
  of_kinds = config.part('rope_parameters')
  full = of_kinds.part('full_attention')
  if full.of_one(str, 'rope_type', 'type') != 'proportional':
    raise full.unexpected('rope_type', "'proportional'")
  full.only('factor', 1.0)
  share = full.number('partial_rotary_factor', 1.0)
  return {
    'rope_theta': full.number('rope_theta'),
    'rope_scaling': rotary.ProportionalRope(share),
    'sliding_rope_theta': _local_theta(of_kinds),
  }


def _experts4(config):
  names = 'moe_intermediate_size', 'expert_intermediate_size'
  return experts.Experts(
    num_experts=config.size('num_experts'),
    num_per_token=config.size('top_k_experts'),
    mlp_dim=config.size_of_one(*names),
    is_beside_mlp=True,
  )


def _parts4(model: transformer.Transformer) -> tensors.Parts:
  """Divides the matrices of all experts, [E, out, in]."""
  of_layers = '.embed_tokens_per_layer.weight'
  found = {of_layers: {of_layers: tensors.Part((1, 0))}}
  if model.experts is not None:
    size, order, down = model.experts.mlp_dim, (1, 2, 0), 'experts.down_proj'
    found[_FUSED] = {
      _FUSED + _GATE: tensors.Part(order, 1, range(size)),
      _FUSED + _UP: tensors.Part(order, 1, range(size, 2 * size)),
    }
    found[down] = {down: tensors.Part(order)}
  return found


# What a drafter's layers do not have.
_NOT_IN_DRAFTERS = {
  'hidden_size_per_layer_input': 0,
  'enable_moe_block': False,
  'use_double_wide_mlp': False,
}


def assistant(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  """Returns the layers of an assistant, as the last ones of a model.

  The first two stand for layers of the target, one with a window and one
  without, whose keys and values the others read.
  """
  text = config.part('text_config')
  for key, supported in _NOT_IN_DRAFTERS.items():
    text.only(key, supported)
  # The text model's own default is another.
  values = {'hidden_size_per_layer_input': 0, 'num_kv_shared_layers': 0}
  alone = GEMMA4.model(text.changed(values), dtype)
  assert alone.sliding_layers is not None
  return dataclasses.replace(
    alone,
    num_layers=2 + alone.num_layers,
    sliding_layers=(0, *(2 + i for i in alone.sliding_layers)),
    num_shared=alone.num_layers,
  )


def drafter_layers(
  config: config_lib.Config, dtype: str, head_dim: int, num_kv_heads: int
) -> transformer.Transformer:
  """Returns a model whose layers are those of a drafter that DeepSpec trains.

  They are Gemma 4's without a window, each with keys and values of its own,
  whatever the target's layers share. All have the sizes that are given.
  """
  for key, supported in _NOT_IN_DRAFTERS.items():
    config.only(key, supported)
  kinds = ['full_attention'] * config.layers('num_hidden_layers')
  if config.get('layer_types', list[str], kinds) != kinds:
    raise config.unexpected('layer_types', f'{kinds}, without a window')
  values = {
    'layer_types': kinds,
    'hidden_size_per_layer_input': 0,
    'num_kv_shared_layers': 0,
    'use_bidirectional_attention': None,
    'per_layer_config': None,
    'global_head_dim': head_dim,
    'num_global_key_value_heads': None,
    'num_key_value_heads': num_kv_heads,
  }
  made = GEMMA4.model(config.changed(values), dtype)
  return dataclasses.replace(
    made,
    head_dim=head_dim,
    full_head_dim=None,
    full_kv_heads=None,
    sliding_window=None,
    sliding_layers=None,
    sliding_rope_theta=None,
    has_layer_scalars=False,
  )


GEMMA4 = family.Family(
  _gemma4,
  _NAMES4,
  parts=_parts4,
  only=_ACTIVATION | {'attention_bias': False, 'rope_scaling': None},
  defaults=llama.DEFAULTS
  | {
    'tie_word_embeddings': True,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    'global_head_dim': 512,
    'vocab_size': 262_144,
    'vocab_size_per_layer_input': 262_144,
    'hidden_size_per_layer_input': 256,
    'max_position_embeddings': 131_072,
    'sliding_window': 512,
    'rope_parameters': _ROPE4,
  },
)
