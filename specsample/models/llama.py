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

# The length that a model was trained for before its rope was scaled.
_ORIGINAL = 'original_max_position_embeddings'
_PARTIAL = 'partial_rotary_factor'


def shape(
  config: config_lib.Config,
  dtype: str,
  of_rope: config_lib.Config | None = None,
) -> dict[str, Any]:
  """Returns the `Transformer` fields that are common to all families.

  `of_rope` is the rope of the layers without a window, if layers differ.
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
    'max_length': _max_length(config, of_rope or rope_part(config)),
    'norm_eps': config.number('rms_norm_eps'),
    'tie_embeddings': config.flag('tie_word_embeddings'),
    'dtype': dtype,
  }


def _max_length(config, of_rope):
  """Returns the longest text: with YaRN, the one that it extends to."""
  given = config.size('max_position_embeddings')
  if of_rope.of_one('rope_type', 'type') != 'yarn':
    return given
  original = of_rope.size(_ORIGINAL)
  return max(given, int(of_rope.number('factor') * original))


def rope(
  config: config_lib.Config, theta: float = 10_000.0, is_partial: bool = False
) -> dict[str, Any]:
  """Returns the fields rope_theta and rope_scaling of a `Transformer`.

  `theta` is the family's default; `is_partial` tells whether the family may
  rotate only a part of a head, which the caller then reads.

  transformers 5 writes rope_parameters. Version 4 wrote rope_theta and
  rope_scaling, whose key rope_type was once called type.
  """
  return rope_of(rope_part(config), theta, is_partial)


def rope_part(config: config_lib.Config) -> config_lib.Config:
  """Returns the parameters of a rope that is the same in all layers."""
  parts = {
    key: part
    for key in ('rope_parameters', 'rope_scaling')
    if (part := config.part(key)).values
  }
  for key, part in parts.items():
    for kind in ('full_attention', 'sliding_attention'):
      if part.has(kind):
        raise config.unexpected(key, 'one rope for all layers')
    for name in ('rope_theta', _ORIGINAL, _PARTIAL):
      config.agreed(
        {name: config.get(name), f'{name} of {key}': part.get(name)}
      )
  outer = {
    'rope_theta': config.get('rope_theta'),
    _PARTIAL: config.get(_PARTIAL),
    _ORIGINAL: config.get(_ORIGINAL, config.get('max_position_embeddings')),
  }
  made = [
    config_lib.Config(outer | dict(part.values), config.origin)
    for part in parts.values()
  ]
  if len(made) == 2 and _is_unlike(*made):
    config.agreed({key: part.values for key, part in parts.items()})
  return made[0] if made else config_lib.Config(outer, config.origin)


def _is_unlike(one, other):
  """Returns whether two ropes differ."""
  made = [rope_of(x, is_partial=True) for x in (one, other)]
  return made[0] != made[1] or one.get(_PARTIAL) != other.get(_PARTIAL)


def rope_of(
  parameters: config_lib.Config,
  theta: float = 10_000.0,
  is_partial: bool = False,
) -> dict[str, Any]:
  """Like `rope`, but reads the rope parameters themselves."""
  number, origin = parameters.number, parameters.origin
  if not is_partial:
    parameters.only(_PARTIAL, 1.0)
  kind = parameters.of_one('rope_type', 'type') or 'default'
  scaling: rotary.Scaling | None = None
  if kind == 'linear':
    scaling = rotary.LinearRope(factor=number('factor'))
  elif kind == 'llama3':
    scaling = rotary.Llama3Rope(
      factor=number('factor'),
      low_freq_factor=number('low_freq_factor'),
      high_freq_factor=number('high_freq_factor'),
      original_max_length=parameters.size(_ORIGINAL),
    )
  elif kind == 'yarn':
    scaling = rotary.YarnRope(
      factor=number('factor'),
      original_max_length=parameters.size(_ORIGINAL),
      fast=number('beta_fast', 32.0),
      slow=number('beta_slow', 1.0),
      scale=_yarn_scale(parameters),
      is_rounded=parameters.flag('truncate', True),
    )
  elif kind != 'default':
    raise ValueError(
      f"{origin}: rope_type is {kind!r}, but only 'default', 'linear', "
      "'llama3' and 'yarn' are supported: give a checkpoint with one of them"
    )
  return {'rope_theta': number('rope_theta', theta), 'rope_scaling': scaling}


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
  """Returns the settings that `rope` reads as a model's."""
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
        _ORIGINAL: scaling.original_max_length,
      }
    case rotary.YarnRope():
      parameters = {
        'rope_type': 'yarn',
        'factor': scaling.factor,
        _ORIGINAL: scaling.original_max_length,
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
    **shape(config, dtype), **rope(config), sliding_window=window(config)
  )


def window(config: config_lib.Config) -> int | None:
  """Returns sliding_window, None if it is null."""
  key = 'sliding_window'
  return None if config.get(key) is None else config.size(key)


def layers_of_kind(
  config: config_lib.Config,
  kind: str,
  known: Collection[str] = ('full_attention', 'sliding_attention'),
) -> tuple[int, ...]:
  """Returns the indices of the layers whose layer_types entry is `kind`."""
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


DEFAULTS = {'rms_norm_eps': 1e-6}
LLAMA = family.Family(_llama, NAMES, defaults=DEFAULTS)
MISTRAL = family.Family(
  _mistral,
  NAMES,
  defaults=DEFAULTS
  | {
    'num_key_value_heads': 8,
    'max_position_embeddings': 131_072,
    'sliding_window': 4096,
  },
)
