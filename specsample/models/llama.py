"""The Llama family: Llama 2 and 3, SmolLM2, Mistral.

Touvron et al., 2307.09288; Dubey et al., 2407.21783; Jiang et al., 2310.06825.
Other families reuse the parts that they share with Llama.
"""

from collections.abc import Collection
import math
from typing import Any

from specsample.models import config as config_lib
from specsample.models import family
from specsample.models import rotary
from specsample.models import transformer

_LAYER = 'model.layers.{}.'
NAMES = {
  'embedding': 'model.embed_tokens.weight',
  'unembedding': 'lm_head.weight',
  'norm.scale': 'model.norm.weight',
  'layers.{}.attention_norm.scale': _LAYER + 'input_layernorm.weight',
  'layers.{}.attention.query.kernel': _LAYER + 'self_attn.q_proj.weight',
  'layers.{}.attention.query.bias': _LAYER + 'self_attn.q_proj.bias',
  'layers.{}.attention.query_norm.scale': _LAYER + 'self_attn.q_norm.weight',
  'layers.{}.attention.key.kernel': _LAYER + 'self_attn.k_proj.weight',
  'layers.{}.attention.key.bias': _LAYER + 'self_attn.k_proj.bias',
  'layers.{}.attention.key_norm.scale': _LAYER + 'self_attn.k_norm.weight',
  'layers.{}.attention.value.kernel': _LAYER + 'self_attn.v_proj.weight',
  'layers.{}.attention.value.bias': _LAYER + 'self_attn.v_proj.bias',
  'layers.{}.attention.out.kernel': _LAYER + 'self_attn.o_proj.weight',
  'layers.{}.attention.out.bias': _LAYER + 'self_attn.o_proj.bias',
  'layers.{}.mlp_norm.scale': _LAYER + 'post_attention_layernorm.weight',
  'layers.{}.mlp.gate.kernel': _LAYER + 'mlp.gate_proj.weight',
  'layers.{}.mlp.up.kernel': _LAYER + 'mlp.up_proj.weight',
  'layers.{}.mlp.down.kernel': _LAYER + 'mlp.down_proj.weight',
}


def shape(config: config_lib.Config, dtype: str) -> dict[str, Any]:
  """Returns the `Transformer` fields that are common to all families.

  Raises:
    ValueError: a field is missing or makes no sense.
  """
  config.only('mlp_bias', False)
  num_heads = config.size('num_attention_heads')
  dim = config.size('hidden_size')
  return {
    'vocab_size': config.size('vocab_size'),
    'num_layers': config.layers('num_hidden_layers'),
    'dim': dim,
    'num_heads': num_heads,
    'num_kv_heads': config.size('num_key_value_heads', num_heads),
    'head_dim': config.size('head_dim', max(dim // num_heads, 1)),
    'mlp_dim': config.size('intermediate_size'),
    'max_length': _max_length(config),
    'norm_eps': config.number('rms_norm_eps', 1e-6),
    'tie_embeddings': config.flag('tie_word_embeddings'),
    'dtype': dtype,
  }


def _max_length(config):
  """Returns the longest text: with YaRN, the one that it extends to."""
  given = config.size('max_position_embeddings')
  of_rope = _rope_part(config)
  if of_rope.get('rope_type', of_rope.get('type')) != 'yarn':
    return given
  original = of_rope.size('original_max_position_embeddings')
  return max(given, int(of_rope.number('factor') * original))


def _rope_part(config):
  key = 'rope_parameters' if config.get('rope_parameters') else 'rope_scaling'
  return config.part(key)


def rope(config: config_lib.Config) -> dict[str, Any]:
  """Returns the fields rope_theta and rope_scaling of a `Transformer`.

  transformers 5 writes rope_parameters. Version 4 wrote rope_theta and
  rope_scaling, whose key rope_type was once called type.
  """
  theta = config.get('rope_theta', 10_000.0)
  values = {'rope_theta': theta} | dict(_rope_part(config).values)
  return rope_of(config_lib.Config(values, config.origin))


def rope_of(parameters: config_lib.Config) -> dict[str, Any]:
  """Like `rope`, but reads the rope parameters themselves."""
  number, origin = parameters.number, parameters.origin
  kind = parameters.get('rope_type', parameters.get('type', 'default'))
  scaling: rotary.Scaling | None = None
  if kind == 'linear':
    scaling = rotary.LinearRope(factor=number('factor'))
  elif kind == 'llama3':
    scaling = rotary.Llama3Rope(
      factor=number('factor'),
      low_freq_factor=number('low_freq_factor'),
      high_freq_factor=number('high_freq_factor'),
      original_max_length=parameters.size('original_max_position_embeddings'),
    )
  elif kind == 'yarn':
    scaling = rotary.YarnRope(
      factor=number('factor'),
      original_max_length=parameters.size('original_max_position_embeddings'),
      fast=number('beta_fast', 32.0),
      slow=number('beta_slow', 1.0),
      scale=_yarn_scale(parameters),
      is_rounded=parameters.flag('truncate', True),
    )
  elif kind != 'default':
    raise ValueError(
      f"{origin}: rope scaling is {kind!r}, but only 'default', 'linear', "
      "'llama3' and 'yarn' are supported"
    )
  return {'rope_theta': number('rope_theta'), 'rope_scaling': scaling}


def _yarn_scale(parameters):
  given = parameters.optional_number('attention_factor')
  parts = [
    parameters.optional_number(key) for key in ('mscale', 'mscale_all_dim')
  ]
  if given is not None or None in parts:
    return given
  grown = [yarn_growth(parameters.number('factor'), part) for part in parts]
  return grown[0] / grown[1]


def rope_settings(model: transformer.Transformer) -> dict[str, Any]:
  """Returns the settings that `rope` reads as a model's.

  Raises:
    ValueError: they are scaled in a way that no configuration describes.
  """
  scaling = model.rope_scaling
  match scaling:
    case None:
      parameters = None
    case rotary.LinearRope():
      parameters = {'rope_type': 'linear', 'factor': scaling.factor}
    case rotary.Llama3Rope():
      parameters = {
        'rope_type': 'llama3',
        'factor': scaling.factor,
        'low_freq_factor': scaling.low_freq_factor,
        'high_freq_factor': scaling.high_freq_factor,
        'original_max_position_embeddings': scaling.original_max_length,
      }
    case rotary.YarnRope():
      parameters = {
        'rope_type': 'yarn',
        'factor': scaling.factor,
        'original_max_position_embeddings': scaling.original_max_length,
        'beta_fast': scaling.fast,
        'beta_slow': scaling.slow,
        'attention_factor': scaling.scale,
        'truncate': scaling.is_rounded,
      }
    case _:
      raise ValueError(
        f'rope_scaling is {scaling}, which config.json cannot describe: load '
        "the target from a folder in Hugging Face's layout"
      )
  return {'rope_theta': model.rope_theta, 'rope_scaling': parameters}


def yarn_growth(factor: float, weight: float) -> float:
  """Returns YaRN's attention scale for a scaling factor and a weight."""
  return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _llama(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config.only('hidden_act', 'silu')
  has_bias = config.flag('attention_bias')
  return transformer.Transformer(
    **shape(config, dtype),
    **rope(config),
    attention_bias=has_bias,
    attention_out_bias=has_bias,
  )


def _mistral(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  config.only('hidden_act', 'silu')
  return transformer.Transformer(
    **shape(config, dtype), **rope(config), sliding_window=window(config, 4096)
  )


def window(config: config_lib.Config, default: int) -> int | None:
  """Returns sliding_window, None if null; `default` is that of transformers."""
  if config.values.get('sliding_window', default) is None:
    return None
  return config.size('sliding_window', default)


def layers_of_kind(
  config: config_lib.Config,
  kind: str,
  known: Collection[str] = ('full_attention', 'sliding_attention'),
) -> tuple[int, ...]:
  """Returns the indices of the layers whose layer_types entry is `kind`.

  Raises:
    ValueError: layer_types is not a list of one known kind per layer.
  """
  kinds = config.get('layer_types')
  is_list = isinstance(kinds, list)
  if (
    not is_list
    or len(kinds) != config.size('num_hidden_layers')
    or not set(known).issuperset(kinds)
  ):
    raise config.unexpected(
      'layer_types', f'one of {sorted(known)} for each layer'
    )
  return tuple(i for i, of_layer in enumerate(kinds) if of_layer == kind)


LLAMA = family.Family(_llama, NAMES)
MISTRAL = family.Family(_mistral, NAMES)
