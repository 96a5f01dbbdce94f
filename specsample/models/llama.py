"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and Mixtral.

Touvron et al., 2307.09288; Dubey et al., 2407.21783; Jiang et al., 2310.06825
and 2401.04088. Other families reuse the parts that they share with Llama.
"""

from collections.abc import Collection, Iterable
import dataclasses
import math
from typing import Any

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import rotary
from specsample.models import transformer

NAMES = {
  'embedding': 'model.embed_tokens.weight',
  'unembedding': 'lm_head.weight',
  'norm.scale': 'model.norm.weight',
} | family.of_layers(
  {
    'attention_norm.scale': 'input_layernorm.weight',
    'attention.query.kernel': 'self_attn.q_proj.weight',
    'attention.query.bias': 'self_attn.q_proj.bias',
    'attention.query_norm.scale': 'self_attn.q_norm.weight',
    'attention.key.kernel': 'self_attn.k_proj.weight',
    'attention.key.bias': 'self_attn.k_proj.bias',
    'attention.key_norm.scale': 'self_attn.k_norm.weight',
    'attention.value.kernel': 'self_attn.v_proj.weight',
    'attention.value.bias': 'self_attn.v_proj.bias',
    'attention.out.kernel': 'self_attn.o_proj.weight',
    'attention.out.bias': 'self_attn.o_proj.bias',
    'mlp_norm.scale': 'post_attention_layernorm.weight',
    'mlp.gate.kernel': 'mlp.gate_proj.weight',
    'mlp.up.kernel': 'mlp.up_proj.weight',
    'mlp.down.kernel': 'mlp.down_proj.weight',
  }
)

# The kinds of layers that have attention.
_KINDS = ('full_attention', 'sliding_attention')
# The length that a model was trained for before its rope was scaled.
_ORIGINAL = 'original_max_position_embeddings'
_PARTIAL = 'partial_rotary_factor'
_SCALINGS = ('linear', 'llama3', 'yarn')


def experts_names(
  prefix: str, own: tuple[str, ...] = ('gate_proj', 'up_proj', 'down_proj')
) -> dict[str, str]:
  """Returns the names of a router and of the matrices of its experts.

  Args:
    prefix: that of the tensors within a layer.
    own: the names of an expert's matrices.
  """
  ours = 'mlp.expert_gate', 'mlp.expert_up', 'mlp.expert_down'
  return family.of_layers(
    {
      'mlp.router.kernel': f'{prefix}gate.weight',
      **{
        f'{bank}.kernel': f'{prefix}experts.*.{name}.weight'
        for bank, name in zip(ours, own, strict=True)
      },
    }
  )


def shared_names(prefix: str) -> dict[str, str]:
  """Returns the names of a feed-forward that sees every token."""
  return family.of_layers(
    {
      f'mlp.shared.{name}.kernel': f'{prefix}{name}_proj.weight'
      for name in ('gate', 'up', 'down')
    }
  )


def shape(config: config_lib.Config) -> dict[str, Any]:
  """Returns the `Transformer` fields that are common to all families."""
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
    'norm_eps': config.number('rms_norm_eps'),
    'tie_embeddings': config.flag('tie_word_embeddings'),
  }


def biases(config: config_lib.Config) -> dict[str, Any]:
  """Returns the fields of biases that all projections of attention have."""
  has_bias = config.flag('attention_bias')
  return {'attention_bias': has_bias, 'attention_out_bias': has_bias}


def _max_length(config):
  """Returns the longest text: with YaRN, the one that it extends to.

  If layers differ, only those without a window extend it.
  """
  given, of_kinds = config.size('max_position_embeddings'), ropes(config)
  of_rope = next(iter(of_kinds.values())) if of_kinds else rope_part(config)
  if of_rope.of_one(str, 'rope_type', 'type') != 'yarn':
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


def ropes(config: config_lib.Config) -> dict[str, config_lib.Config]:
  """Returns the ropes by the kind of layers, as transformers 5 writes them.

  There are none if all layers have the same rope.
  """
  parts = config.part('rope_parameters')
  return {kind: parts.part(kind) for kind in _KINDS if parts.has(kind)}


def rope_part(config: config_lib.Config) -> config_lib.Config:
  """Returns the parameters of a rope that is the same in all layers."""
  parts = {
    key: part
    for key in ('rope_parameters', 'rope_scaling')
    if (part := config.part(key)).values
  }
  for key, part in parts.items():
    if not part.values.keys().isdisjoint(_KINDS):
      raise config.unexpected(key, 'one rope for all layers')
    for name in ('rope_theta', _ORIGINAL, _PARTIAL):
      config.agreed(
        {
          name: config.get(name, float),
          f'{name} of {key}': part.get(name, float),
        }
      )
  outer = config_lib.Config(
    {
      'rope_theta': config.get('rope_theta', float),
      _PARTIAL: config.get(_PARTIAL, float),
      _ORIGINAL: config.get(
        _ORIGINAL, int, config.get('max_position_embeddings', int)
      ),
    },
    config.origin,
  )
  made = [outer.changed(part.values) for part in parts.values()]
  if len(made) == 2 and _read(made[0]) != _read(made[1]):
    config.agreed({key: part.values for key, part in parts.items()})
  return made[0] if made else outer


def _read(parameters):
  return rope_of(parameters, is_partial=True), parameters.get(_PARTIAL, float)


def rope_of(
  parameters: config_lib.Config,
  theta: float = 10_000.0,
  is_partial: bool = False,
) -> dict[str, Any]:
  """Like `rope`, but reads the rope parameters themselves."""
  if not is_partial:
    parameters.only(_PARTIAL, 1.0)
  kind = parameters.of_one(str, 'rope_type', 'type') or 'default'
  scaling: rotary.Scaling | None = None
  if kind in _SCALINGS:
    scaling = _scaling(rotary.SCALINGS[kind], parameters)
  elif kind != 'default':
    raise ValueError(
      f"{parameters.origin}: rope_type is {kind!r}, but only 'default', "
      "'linear', 'llama3' and 'yarn' are supported: give a checkpoint with one "
      'of them'
    )
  theta = parameters.number('rope_theta', theta)
  return {'rope_theta': theta, 'rope_scaling': scaling}


def _scaling(kind, parameters):
  readers: dict[Any, Any] = {
    int: parameters.size,
    float: parameters.number,
    bool: parameters.flag,
    float | None: lambda key, default: _yarn_scale(parameters),
  }
  fields = {}
  for field in dataclasses.fields(kind):
    default = None if field.default is dataclasses.MISSING else field.default
    fields[field.name] = readers[field.type](field.name, default)
  return kind(**fields)


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
  scaling, parameters = model.rope_scaling, None
  if scaling is not None:
    kind = rotary.name_of(scaling)
    if kind not in _SCALINGS:
      raise ValueError(
        f'rope_scaling is {scaling}, which config.json cannot describe: load '
        "the target from a folder in Hugging Face's layout"
      )
    parameters = {'rope_type': kind} | dataclasses.asdict(scaling)
  return {'rope_theta': model.rope_theta, 'rope_scaling': parameters}


def yarn_growth(factor: float, weight: float) -> float:
  """Returns YaRN's attention scale for a scaling factor and a weight."""
  return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def all_but_every(step: int, num_layers: int) -> tuple[int, ...]:
  """Returns the layers of which every `step`-th is left out."""
  return tuple(i for i in range(num_layers) if (i + 1) % step)


def layers_of_kind(
  config: config_lib.Config,
  kind: str,
  default: Iterable[int],
  known: Collection[str] = _KINDS,
) -> tuple[int, ...]:
  """Returns the layers whose layer_types entry is `kind`.

  They are the default if the configuration has no such entries.
  """
  kinds = config.get('layer_types', list[str])
  if kinds is None:
    return tuple(default)
  is_whole = len(kinds) == config.size('num_hidden_layers')
  if not is_whole or not set(known).issuperset(kinds):
    raise config.unexpected(
      'layer_types', f'one of {sorted(known)} for each layer'
    )
  return tuple(i for i, of_layer in enumerate(kinds) if of_layer == kind)


def _llama(config):
  return shape(config) | rope(config) | biases(config)


def _mistral(config):
  window = config.optional_size('sliding_window')
  return shape(config) | rope(config) | {'sliding_window': window}


def _mixtral(config):
  fields = shape(config) | rope(config, 1_000_000.0)
  names = 'num_local_experts', 'num_experts'
  sizes = experts.Experts(
    num_experts=config.size_of_one(*names, default=8),
    num_per_token=config.size('num_experts_per_tok'),
    mlp_dim=fields['mlp_dim'],
  )
  window = config.optional_size('sliding_window')
  return fields | {'sliding_window': window, 'experts': sizes}


DEFAULTS = {'rms_norm_eps': 1e-6}
LLAMA = family.Family(_llama, NAMES, defaults=DEFAULTS)
_MISTRAL_DEFAULTS = DEFAULTS | {
  'num_key_value_heads': 8,
  'max_position_embeddings': 131_072,
}
MISTRAL = family.Family(
  _mistral, NAMES, defaults=_MISTRAL_DEFAULTS | {'sliding_window': 4096}
)
MIXTRAL = family.Family(
  _mixtral,
  NAMES | experts_names('block_sparse_moe.', ('w1', 'w3', 'w2')),
  defaults=_MISTRAL_DEFAULTS | {'rms_norm_eps': 1e-5, 'num_experts_per_tok': 2},
)
