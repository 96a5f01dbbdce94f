"""The Gemma family, text only: Gemma 2 (2408.00118), Gemma 3 (2503.19786)."""

import math
from typing import Any

from specsample.models import config as config_lib
from specsample.models import family
from specsample.models import llama
from specsample.models import transformer

_LAYER = 'model.layers.{}.'
_NAMES = llama.NAMES | {
  'layers.{}.attention_post_norm.scale': (
    _LAYER + 'post_attention_layernorm.weight'
  ),
  'layers.{}.mlp_norm.scale': _LAYER + 'pre_feedforward_layernorm.weight',
  'layers.{}.mlp_post_norm.scale': _LAYER + 'post_feedforward_layernorm.weight',
}


def fields(dim: int) -> dict[str, Any]:
  """Returns the `Transformer` fields that both generations share."""
  return {
    'activation': 'gelu_tanh',
    'norm_offset': 1.0,
    'has_post_norms': True,
    'embedding_scale': math.sqrt(dim),
  }


def _shape(config, dtype, defaults):
  """Returns the configuration with defaults, and the fields that both share."""
  given = {k: v for k, v in config.values.items() if v is not None}
  filled = {
    'tie_word_embeddings': True,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 256,
    **defaults,
    **given,
  }
  config = config_lib.Config(filled, config.origin)
  config.only('hidden_activation', 'gelu_pytorch_tanh')
  config.only('use_bidirectional_attention', False)
  has_bias = config.flag('attention_bias')
  shape = llama.shape(config, dtype)
  return config, shape | fields(shape['dim']) | {
    'attention_bias': has_bias,
    'attention_out_bias': has_bias,
    'query_scale': config.number('query_pre_attn_scalar', 256) ** -0.5,
    'attention_softcap': config.optional_number('attn_logit_softcapping'),
    'logit_softcap': config.optional_number('final_logit_softcapping'),
    'sliding_window': config.size('sliding_window', 4096),
    'sliding_layers': _sliding_layers(config, shape['num_layers']),
  }


def _sliding_layers(config, num_layers):
  if config.get('layer_types') is not None:
    return llama.layers_of_kind(config, 'sliding_attention')
  return sliding_layers(num_layers, config.size('sliding_window_pattern'))


def sliding_layers(num_layers: int, step: int) -> tuple[int, ...]:
  """Returns the layers with a window, if every `step`-th layer has none."""
  return tuple(i for i in range(num_layers) if (i + 1) % step)


def _gemma2(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config, fields = _shape(
    config,
    dtype,
    {
      'max_position_embeddings': 8192,
      'sliding_window_pattern': 2,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
  )
  return transformer.Transformer(**fields, **llama.rope(config))


def _gemma3(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config, fields = _shape(
    config,
    dtype,
    {
      'vocab_size': 262_208,
      'max_position_embeddings': 131_072,
      'sliding_window_pattern': 6,
      'rope_theta': 1_000_000.0,
    },
  )
  return transformer.Transformer(**fields, qk_norm=True, **_gemma3_rope(config))


def _gemma3_rope(config):
  """Returns the rope's fields; transformers 5 writes them per layer type."""
  new = config.part('rope_parameters')
  if 'full_attention' not in new.values:
    theta = config.number('rope_local_base_freq', 10_000.0)
    return llama.rope(config) | {'sliding_rope_theta': theta}
  local = llama.rope_of(new.part('sliding_attention'))
  if local['rope_scaling'] is not None:
    raise new.unexpected('sliding_attention', 'a rope that is not scaled')
  full = llama.rope_of(new.part('full_attention'))
  return full | {'sliding_rope_theta': local['rope_theta']}


def _gemma3_with_images(
  config: config_lib.Config, dtype: str
) -> transformer.Transformer:
  return _gemma3(config.part('text_config'), dtype)


def _name_of_text(name):
  """Returns a text tensor's name from either layout; None for image tensors."""
  of_images = ('vision_tower.', 'multi_modal_projector.')
  if name.removeprefix('model.').startswith(of_images):
    return None
  name = name.removeprefix('language_model.')
  name = name.replace('model.language_model.', 'model.', 1)
  return family.own_name(name)


GEMMA2 = family.Family(_gemma2, _NAMES)
GEMMA3 = family.Family(_gemma3, _NAMES)
# Only the text model, without the part that reads images.
GEMMA3_WITH_IMAGES = family.Family(
  _gemma3_with_images, _NAMES, own_name=_name_of_text
)
