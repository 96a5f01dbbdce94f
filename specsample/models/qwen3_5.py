"""Qwen3-Next, Qwen3.5 and later: gated delta networks beside attention.

Text only. The norms' weights are stored without the 1 that is added to them,
except those of the recurrent layers.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import gated_delta
from specsample.models import llama
from specsample.models import parts
from specsample.models import qwen
from specsample.models import tensors
from specsample.models import transformer

_KINDS = ('full_attention', 'linear_attention')
_LAYER = 'model.layers.{}.'
_DELTA = _LAYER + 'linear_attn.'
_MLP = _LAYER + 'mlp.'
# The norms that are looked at to see whether 1 was added to them.
_NORM = 'input_layernorm.weight'
# Brackets name a part of a tensor; see `_divided`.
_NAMES = llama.NAMES | {
  f'layers.{{}}.{ours}': theirs
  for ours, theirs in {
    'attention.query.kernel': _LAYER + 'self_attn.q_proj.weight[query]',
    'attention.gate.kernel': _LAYER + 'self_attn.q_proj.weight[gate]',
    'delta.query.kernel': _DELTA + 'in_proj_qkv.weight[query]',
    'delta.key.kernel': _DELTA + 'in_proj_qkv.weight[key]',
    'delta.value.kernel': _DELTA + 'in_proj_qkv.weight[value]',
    'delta.gate.kernel': _DELTA + 'in_proj_z.weight',
    'delta.rate.kernel': _DELTA + 'in_proj_b.weight',
    'delta.decay.kernel': _DELTA + 'in_proj_a.weight',
    'delta.query_convolution': _DELTA + 'conv1d.weight[query]',
    'delta.key_convolution': _DELTA + 'conv1d.weight[key]',
    'delta.value_convolution': _DELTA + 'conv1d.weight[value]',
    'delta.log_decay_scale': _DELTA + 'A_log',
    'delta.decay_bias': _DELTA + 'dt_bias',
    'delta.norm.scale': _DELTA + 'norm.weight',
    'delta.out.kernel': _DELTA + 'out_proj.weight',
    'mlp.router.kernel': _MLP + 'gate.weight',
    'mlp.expert_gate.kernel': _MLP + 'experts.*.gate_proj.weight',
    'mlp.expert_up.kernel': _MLP + 'experts.*.up_proj.weight',
    'mlp.expert_down.kernel': _MLP + 'experts.*.down_proj.weight',
    'mlp.shared.gate.kernel': _MLP + 'shared_expert.gate_proj.weight',
    'mlp.shared.up.kernel': _MLP + 'shared_expert.up_proj.weight',
    'mlp.shared.down.kernel': _MLP + 'shared_expert.down_proj.weight',
    'mlp.shared_gate.kernel': _MLP + 'shared_expert_gate.weight',
  }.items()
}
# Qwen3-Next stores all products of a recurrent layer's input in two tensors.
_NEXT_NAMES = _NAMES | {
  f'layers.{{}}.delta.{ours}.kernel': f'{_DELTA}{theirs}[{ours}]'
  for ours, theirs in {
    'query': 'in_proj_qkvz.weight',
    'key': 'in_proj_qkvz.weight',
    'value': 'in_proj_qkvz.weight',
    'gate': 'in_proj_qkvz.weight',
    'rate': 'in_proj_ba.weight',
    'decay': 'in_proj_ba.weight',
  }.items()
}


def _fields(config, dtype) -> dict[str, Any]:
  for key, supported in (
    ('hidden_act', 'silu'),
    ('attention_bias', False),
    ('attn_output_gate', True),
    ('mamba_ssm_dtype', 'float32'),
  ):
    config.only(key, supported)
  shape = llama.shape(config, dtype)
  return (
    shape
    | llama.rope(config, is_partial=True)
    | {
      'norm_offset': 1.0,
      'qk_norm': True,
      'has_output_gate': True,
      'rotary_dim': _rotary_dim(config, shape['head_dim']),
      'delta': gated_delta.Delta(
        layers=_recurrent_layers(config, shape['num_layers']),
        num_key_heads=config.size('linear_num_key_heads'),
        num_value_heads=config.size('linear_num_value_heads'),
        key_dim=config.size('linear_key_head_dim'),
        value_dim=config.size('linear_value_head_dim'),
        kernel=config.size('linear_conv_kernel_dim'),
      ),
    }
  )


def _rotary_dim(config, head_dim):
  key = 'partial_rotary_factor'
  share = llama.rope_part(config).number(key, 0.25)
  size = int(head_dim * share)
  if share > 1 or size < 2 or size % 2:
    raise ValueError(
      f'{config.origin}: {key} is {share}, by which {size} of {head_dim} '
      'dimensions of a head would be rotated: give a factor of at most 1 that '
      'makes an even number'
    )
  return size


def _recurrent_layers(config, num_layers):
  if config.get('layer_types') is None:
    step = config.size('full_attention_interval', 4)
    return tuple(i for i in range(num_layers) if (i + 1) % step)
  return llama.layers_of_kind(config, 'linear_attention', _KINDS)


def _experts(config) -> experts.Experts:
  return experts.Experts(
    num_experts=config.size('num_experts'),
    num_per_token=config.size('num_experts_per_tok'),
    mlp_dim=config.size('moe_intermediate_size'),
    is_normalised=config.flag('norm_topk_prob'),
    dense_layers=qwen.dense_layers(config),
    shared_dim=config.size('shared_expert_intermediate_size'),
    has_shared_gate=True,
  )


def _dense(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  return transformer.Transformer(**_fields(config, dtype))


def _sparse(config: config_lib.Config, dtype: str) -> transformer.Transformer:
  # No layer has a single feed-forward, so its width is often left out.
  width = config.get('intermediate_size', config.get('moe_intermediate_size'))
  config = config_lib.Config(
    dict(config.values) | {'intermediate_size': width}, config.origin
  )
  return transformer.Transformer(
    **_fields(config, dtype), experts=_experts(config)
  )


def _own_name(name):
  """Returns a text tensor's name in `_NAMES`; None for other tensors."""
  if name.startswith('model.visual.'):
    return None
  return family.own_name(name.replace('model.language_model.', 'model.', 1))


_View = Callable[[tensors.Tensor], tensors.Tensor]


@dataclasses.dataclass(frozen=True)
class _Division:
  """A tensor's expected shape, and the shape and the view of each part."""

  shape: tuple[int, ...]
  parts: Mapping[str, tuple[tuple[int, ...], _View]]


def _divided(
  model: transformer.Transformer, file: tensors.TensorFile
) -> tensors.TensorFile:
  """Returns the tensors, with those of several parameters divided into them."""
  if model.delta is None:  # a target of another family than the folder's
    return file
  shapes: dict[str, tuple[int, ...]] = {}
  sources: dict[str, tuple[str, _View]] = {}
  for name, shape in file.shapes.items():
    division = _division(model, name)
    if division is None:
      shapes[name] = shape
      continue
    _refuse_converted(file, name, shape)
    different = tensors.differences({name: division.shape}, {name: shape})
    tensors.refuse(different, file.origin)
    for part, (of_part, view) in division.parts.items():
      shapes[part] = of_part
      sources[part] = name, view

  check_norms = functools.cache(functools.partial(_refuse_shifted, file))

  def open_one(name):
    check_norms()
    if name not in sources:
      return file.open(name)
    source, view = sources[name]
    return view(file.open(source))

  return dataclasses.replace(file, shapes=shapes, open=open_one)


def _refuse_converted(file, name, shape):
  """Refuses a convolution that other libraries have transposed.

  They have added 1 to the norms as well, whose shapes do not show it.
  """
  if name.endswith('conv1d.weight') and len(shape) == 3 and shape[1] != 1:
    raise ValueError(
      f'{file.origin}: tensor {name} has shape {shape}, expected [channels, 1, '
      'kernel]: the checkpoint was converted for another library, which adds 1 '
      'to the norms too; load the original one'
    )


def _refuse_shifted(file):
  """Refuses norms of all layers that have 1 added, as other libraries do.

  Weights that are added to 1 lie on both sides of 0. A model whose norms have 1
  added twice still writes text, only poor text.
  """
  names = [
    name
    for name in file.shapes
    if name.startswith('model.layers.') and name.endswith(_NORM)
  ]
  if not names:  # only a module for multi-token prediction is read
    return
  values = np.concatenate([file.open(name)[(slice(None),)] for name in names])
  values = values.astype(np.float32)
  if np.mean(values < 0) < 1e-3 and np.median(values) > 0.5:
    raise ValueError(
      f'{file.origin}: the weights {_NORM} have a median of '
      f'{np.median(values):.2f} and few or none below 0, so 1 was added '
      'to them: the checkpoint was converted for another library; load the '
      'original one'
    )


def _division(model, name) -> _Division | None:
  """Returns how a tensor is divided; None if it is one parameter."""
  _, _, own = name.rpartition('.layers.')[2].partition('.')
  if model.experts is not None and own in _OF_EXPERTS:
    return _of_experts(model, name, _OF_EXPERTS[own])
  if own == 'linear_attn.conv1d.weight':
    return _of_convolution(model.delta, name)
  blocks = _blocks(model).get(own)
  return None if blocks is None else _by_rows(name, *blocks, model.dim)


def _blocks(model) -> dict[str, tuple[dict[str, int], int]]:
  """Returns the sizes of a block's parts by tensor, and how many blocks."""
  delta = model.delta
  values = delta.num_value_heads * delta.value_dim // delta.num_key_heads
  group = delta.num_value_heads // delta.num_key_heads
  of_head = {'query': delta.key_dim, 'key': delta.key_dim, 'value': values}
  return {
    'self_attn.q_proj.weight': (
      {'query': model.head_dim, 'gate': model.head_dim},
      model.num_heads,
    ),
    'linear_attn.in_proj_qkv.weight': (_mixed(delta), 1),
    'linear_attn.in_proj_qkvz.weight': (
      of_head | {'gate': values},
      delta.num_key_heads,
    ),
    'linear_attn.in_proj_ba.weight': (
      {'rate': group, 'decay': group},
      delta.num_key_heads,
    ),
  }


def _mixed(delta):
  """Returns the sizes of a token's queries, keys and values."""
  of_keys = delta.num_key_heads * delta.key_dim
  of_values = delta.num_value_heads * delta.value_dim
  return {'query': of_keys, 'key': of_keys, 'value': of_values}


def _by_rows(name, sizes, count, width) -> _Division:
  """Divides each of `count` blocks of rows into parts of these sizes."""
  block, start, found = sum(sizes.values()), 0, {}
  for part, size in sizes.items():
    view = functools.partial(
      parts.Rows, start=start, size=size, block=block, count=count
    )
    found[f'{name}[{part}]'] = (count * size, width), view
    start += size
  return _Division((count * block, width), found)


def _of_convolution(delta, name) -> _Division:
  """Divides a tensor [channels, 1, kernel]."""
  rows = _by_rows(name, _mixed(delta), 1, delta.kernel)
  view = lambda part: lambda x: part(parts.WithoutAxis(x))
  found = {
    part: (shape, view(of_rows))
    for part, (shape, of_rows) in rows.parts.items()
  }
  return _Division((rows.shape[0], 1, delta.kernel), found)


# The matrices of each expert in a tensor of all experts, one below the other.
_OF_EXPERTS = {
  'mlp.experts.gate_up_proj': ('gate_proj', 'up_proj'),
  'mlp.experts.down_proj': ('down_proj',),
}


def _of_experts(model, name, own_names) -> _Division:
  count, size, width = (
    model.experts.num_experts,
    model.experts.mlp_dim,
    model.dim,
  )
  if own_names == ('down_proj',):
    size, width = width, size
  before, _, _ = name.rpartition('.')
  whole = count, len(own_names) * size, width
  cut = lambda start: parts.Part((1, 2, 0), 1, start, start + size)
  found = {
    f'{before}.*.{own}.weight': (
      (size, width, count),
      functools.partial(parts.View, shape=whole, part=cut(i * size)),
    )
    for i, own in enumerate(own_names)
  }
  return _Division(whole, found)


_make = functools.partial(
  family.Family,
  own_name=_own_name,
  divided=_divided,
  text=family.text_part,
  mtp_prefix='mtp.',
)
_DEFAULTS = llama.DEFAULTS | {
  'num_attention_heads': 16,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'max_position_embeddings': 32_768,
  'linear_conv_kernel_dim': 4,
  'linear_key_head_dim': 128,
  'linear_value_head_dim': 128,
  'linear_num_key_heads': 16,
  'linear_num_value_heads': 32,
}
_MOE_DEFAULTS = _DEFAULTS | {
  'num_key_value_heads': 2,
  'num_experts': 256,
  'num_experts_per_tok': 8,
  'moe_intermediate_size': 512,
  'shared_expert_intermediate_size': 512,
  'norm_topk_prob': True,
}
_NEXT_DEFAULTS = _MOE_DEFAULTS | {'num_experts': 512, 'num_experts_per_tok': 10}
QWEN3_5 = _make(_dense, _NAMES, defaults=_DEFAULTS)
QWEN3_5_MOE = _make(_sparse, _NAMES, defaults=_MOE_DEFAULTS)
QWEN3_NEXT = _make(_sparse, _NEXT_NAMES, defaults=_NEXT_DEFAULTS)
