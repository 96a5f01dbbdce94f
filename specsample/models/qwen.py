"""The Qwen family: Qwen 2.5 (2412.15115), 3 (2505.09388), 3-Next and 3.5.

Text only. Since Qwen3-Next, most layers are gated delta networks. The norms'
weights are then stored without the 1 that is added to them, except those of the
recurrent layers.
"""

from collections.abc import Mapping
import functools
from typing import Any

import numpy as np

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import gated_delta
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer


def _fields(config, dtype):
  fields = llama.shape(config, dtype) | llama.rope(config)
  if config.flag('use_sliding_window'):
    fields |= {
      'sliding_window': config.optional_size('sliding_window'),
      'sliding_layers': sliding_layers(config, fields['num_layers']),
    }
  return fields


def sliding_layers(
  config: config_lib.Config, num_layers: int
) -> tuple[int, ...]:
  """Returns the layers with a window in a model that uses windows."""
  if config.get('layer_types') is None:
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
  # transformers 5 writes num_local_experts.
  names = 'num_experts', 'num_local_experts'
  return transformer.Transformer(
    **fields,
    experts=experts.Experts(
      num_experts=config.size_of_one(*names, default=128),
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
QWEN2 = family.Family(_qwen2, llama.NAMES, defaults=_DEFAULTS)
QWEN3 = family.Family(
  _qwen3, llama.NAMES, defaults=_DEFAULTS | {'head_dim': 128}
)
QWEN3_MOE = family.Family(
  _qwen3_moe,
  llama.NAMES | llama.experts_names('mlp.'),
  defaults=_DEFAULTS
  | {
    'num_key_value_heads': 4,
    'num_experts_per_tok': 8,
    'moe_intermediate_size': 768,
  },
)

_KINDS = ('full_attention', 'linear_attention')
# The norms that are looked at to see whether 1 was added to them.
_NORM = 'input_layernorm.weight'
_CONVOLUTION = 'linear_attn.conv1d.weight'
# Brackets name a part of a tensor; see `_divided`.
_HYBRID_NAMES = (
  llama.NAMES
  | llama.experts_names('mlp.')
  | llama.shared_names('mlp.shared_expert.')
  | family.of_layers(
    {
      'attention.query.kernel': 'self_attn.q_proj.weight[query]',
      'attention.gate.kernel': 'self_attn.q_proj.weight[gate]',
      'delta.query.kernel': 'linear_attn.in_proj_qkv.weight[query]',
      'delta.key.kernel': 'linear_attn.in_proj_qkv.weight[key]',
      'delta.value.kernel': 'linear_attn.in_proj_qkv.weight[value]',
      'delta.gate.kernel': 'linear_attn.in_proj_z.weight',
      'delta.rate.kernel': 'linear_attn.in_proj_b.weight',
      'delta.decay.kernel': 'linear_attn.in_proj_a.weight',
      'delta.query_convolution': _CONVOLUTION + '[query]',
      'delta.key_convolution': _CONVOLUTION + '[key]',
      'delta.value_convolution': _CONVOLUTION + '[value]',
      'delta.log_decay_scale': 'linear_attn.A_log',
      'delta.decay_bias': 'linear_attn.dt_bias',
      'delta.norm.scale': 'linear_attn.norm.weight',
      'delta.out.kernel': 'linear_attn.out_proj.weight',
      'mlp.shared_gate.kernel': 'mlp.shared_expert_gate.weight',
    }
  )
)
# Qwen3-Next stores all products of a recurrent layer's input in two tensors.
_NEXT_NAMES = _HYBRID_NAMES | family.of_layers(
  {
    f'delta.{ours}.kernel': f'linear_attn.{theirs}.weight[{ours}]'
    for ours, theirs in {
      'query': 'in_proj_qkvz',
      'key': 'in_proj_qkvz',
      'value': 'in_proj_qkvz',
      'gate': 'in_proj_qkvz',
      'rate': 'in_proj_ba',
      'decay': 'in_proj_ba',
    }.items()
  }
)


def _hybrid_dense(
  config: config_lib.Config, dtype: str
) -> transformer.Transformer:
  return transformer.Transformer(**_hybrid_fields(config, dtype))


def _hybrid_sparse(
  config: config_lib.Config, dtype: str
) -> transformer.Transformer:
  # No layer has a single feed-forward, so its width is often left out.
  width = config.get('intermediate_size', config.get('moe_intermediate_size'))
  config = config.changed({'intermediate_size': width})
  return transformer.Transformer(
    **_hybrid_fields(config, dtype),
    experts=experts.Experts(
      num_experts=config.size('num_experts'),
      num_per_token=config.size('num_experts_per_tok'),
      mlp_dim=config.size('moe_intermediate_size'),
      is_normalised=config.flag('norm_topk_prob'),
      dense_layers=dense_layers(config),
      shared_dim=config.size('shared_expert_intermediate_size'),
      has_shared_gate=True,
    ),
  )


def _hybrid_fields(config, dtype) -> dict[str, Any]:
  shape = llama.shape(config, dtype)
  return {
    **shape,
    **llama.rope(config, is_partial=True),
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


def _own_name(name):
  """Returns a text tensor's name in `_HYBRID_NAMES`; None for other tensors."""
  if name.startswith('model.visual.'):
    return None
  return family.own_name(name.replace('model.language_model.', 'model.', 1))


def _divided(
  model: transformer.Transformer, file: tensors.TensorFile
) -> tensors.Tensors:
  """Returns the tensors, with those of several parameters divided into them."""
  if model.delta is None:  # a target of another family than the folder's
    return file.tensors()
  blocks = _blocks(model)
  found: dict[str, tensors.Tensor] = {}
  for name, tensor in file.tensors().items():
    _, _, own = name.rpartition('.layers.')[2].partition('.')
    if own in _OF_EXPERTS and model.experts is not None:
      whole, parts = _of_experts(model.experts, model.dim, name, tensor)
    elif own in blocks:
      whole, parts = _by_rows(name, tensor, *blocks[own])
    else:
      found[name] = tensor
      continue
    _refuse_converted(file.origin, name, tensor.shape)
    tensors.check_shapes({name: whole}, {name: tensor.shape}, file.origin)
    found |= parts
  return found


def _refuse_converted(origin, name, shape):
  """Refuses a convolution that other libraries have transposed.

  They have added 1 to the norms as well, whose shapes do not show it.
  """
  if name.endswith('conv1d.weight') and len(shape) == 3 and shape[1] != 1:
    raise ValueError(
      f'{origin}: tensor {name} has shape {shape}, expected [channels, 1, '
      'kernel]: the checkpoint was converted for another library, which adds 1 '
      'to the norms too; load the original one'
    )


def _refuse_shifted(file: tensors.TensorFile) -> None:
  """Refuses norms of all layers that have 1 added, as other libraries do.

  Weights that are added to 1 lie on both sides of 0. A model whose norms have 1
  added twice still writes text, only poor text.
  """
  norms = [
    file.open(name)[(slice(None),)].astype(np.float32)
    for name in file.shapes
    if name.startswith('model.layers.') and name.endswith(_NORM)
  ]
  values = np.concatenate([np.zeros(0, np.float32), *norms])
  if np.mean(values < 0) < 1e-3 and np.median(values) > 0.5:
    raise ValueError(
      f'{file.origin}: the weights {_NORM} have a median of '
      f'{np.median(values):.2f} and few or none below 0, so 1 was added '
      'to them: the checkpoint was converted for another library; load the '
      'original one'
    )


def _blocks(model):
  """Returns the division of tensors into blocks of rows.

  By tensor: the sizes of a block's parts, how many blocks there are, and the
  other axes of the tensor.
  """
  delta, width = model.delta, (model.dim,)
  heads = delta.num_key_heads
  group = delta.num_value_heads // heads
  of_head = {
    'query': delta.key_dim,
    'key': delta.key_dim,
    'value': group * delta.value_dim,
  }
  mixed = {part: heads * size for part, size in of_head.items()}
  gated = of_head | {'gate': of_head['value']}
  of_query = {'query': model.head_dim, 'gate': model.head_dim}
  rates = {'rate': group, 'decay': group}
  return {
    'self_attn.q_proj.weight': (of_query, model.num_heads, width),
    'linear_attn.in_proj_qkv.weight': (mixed, 1, width),
    'linear_attn.in_proj_qkvz.weight': (gated, heads, width),
    'linear_attn.in_proj_ba.weight': (rates, heads, width),
    _CONVOLUTION: (mixed, 1, (1, delta.kernel)),
  }


def _by_rows(name, tensor, sizes: Mapping[str, int], count, others):
  """Divides each of `count` blocks of rows into parts of these sizes."""
  start, found, block = 0, {}, sum(sizes.values())
  blocks = np.arange(count)[:, None] * block
  for part, size in sizes.items():
    rows = blocks + start + np.arange(size)
    found[f'{name}[{part}]'] = tensors.Rows(tensor, rows.reshape(-1))
    start += size
  return (count * block, *others), found


# The matrices of each expert in a tensor of all experts, one below the other.
_OF_EXPERTS = {
  'mlp.experts.gate_up_proj': ('gate_proj', 'up_proj'),
  'mlp.experts.down_proj': ('down_proj',),
}


def _of_experts(sizes, dim, name, tensor):
  before, _, own = name.rpartition('.')
  names = _OF_EXPERTS[f'mlp.experts.{own}']
  size, width = sizes.mlp_dim, dim
  if own == 'down_proj':
    size, width = width, size
  found = {}
  for i, of_matrix in enumerate(names):
    part = tensors.Part((1, 2, 0), 1, i * size, (i + 1) * size)
    found[f'{before}.*.{of_matrix}.weight'] = tensors.View(tensor, part)
  return (sizes.num_experts, len(names) * size, width), found


_make = functools.partial(
  family.Family,
  own_name=_own_name,
  divided=_divided,
  check=_refuse_shifted,
  text=family.text_part,
  mtp_prefix='mtp.',
  only={
    'hidden_act': 'silu',
    'attention_bias': False,
    'attn_output_gate': True,
    'mamba_ssm_dtype': 'float32',
  },
)
_HYBRID_DEFAULTS = llama.DEFAULTS | {
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
_HYBRID_MOE_DEFAULTS = _HYBRID_DEFAULTS | {
  'num_key_value_heads': 2,
  'num_experts': 256,
  'num_experts_per_tok': 8,
  'moe_intermediate_size': 512,
  'shared_expert_intermediate_size': 512,
  'norm_topk_prob': True,
}
_NEXT_DEFAULTS = _HYBRID_MOE_DEFAULTS | {
  'num_experts': 512,
  'num_experts_per_tok': 10,
}
QWEN3_5 = _make(_hybrid_dense, _HYBRID_NAMES, defaults=_HYBRID_DEFAULTS)
QWEN3_5_MOE = _make(
  _hybrid_sparse, _HYBRID_NAMES, defaults=_HYBRID_MOE_DEFAULTS
)
QWEN3_NEXT = _make(_hybrid_sparse, _NEXT_NAMES, defaults=_NEXT_DEFAULTS)
