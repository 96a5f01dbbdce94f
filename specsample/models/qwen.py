"""The Qwen family: Qwen 2.5 (2412.15115), 3 (2505.09388), 3-Next and 3.5.

Text only. Since Qwen3-Next, most layers are gated delta networks. The norms'
weights are then stored without the 1 that is added to them, except those of the
recurrent layers.
"""

from collections.abc import Mapping
import functools

import numpy as np

from specsample.models import config as config_lib
from specsample.models import experts
from specsample.models import family
from specsample.models import gated_delta
from specsample.models import llama
from specsample.models import tensors
from specsample.models import transformer


def _fields(config):
  fields = llama.shape(config) | llama.rope(config)
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
  first = max(0, config.get('max_window_layers', int, 28))
  default = range(first, num_layers)
  return llama.layers_of_kind(config, 'sliding_attention', default)


def _dense_layers(config):
  """Returns the layers without experts in a model that has experts."""
  step = config.size('decoder_sparse_step', 1)
  dense = config.get('mlp_only_layers', list[int], [])
  layers = range(config.layers('num_hidden_layers'))
  return tuple(i for i in layers if i in dense or (i + 1) % step)


def _experts(config, num_experts, **others):
  return experts.Experts(
    num_experts=num_experts,
    num_per_token=config.size('num_experts_per_tok'),
    mlp_dim=config.size('moe_intermediate_size'),
    is_normalised=config.flag('norm_topk_prob'),
    dense_layers=_dense_layers(config),
    **others,
  )


def _qwen2(config):
  return _fields(config) | {'attention_bias': True}


def _qwen3(config):
  return _fields(config) | {'qk_norm': True, **llama.biases(config)}


def _qwen3_moe(config):
  # transformers 5 writes num_local_experts.
  names = 'num_experts', 'num_local_experts'
  return _qwen3(config) | {
    # Unlike Qwen 3, it has a window in all layers or in none.
    'sliding_layers': None,
    'experts': _experts(config, config.size_of_one(*names, default=128)),
  }


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
# Brackets name a part of a tensor; see `_parts`.
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


def _hybrid_sparse(config):
  # No layer has a single feed-forward, so its width is often left out.
  if config.values.get('intermediate_size') is None:
    width = config.size('moe_intermediate_size')
    config = config.changed({'intermediate_size': width})
  sizes = _experts(
    config,
    config.size('num_experts'),
    shared_dim=config.size('shared_expert_intermediate_size'),
    has_shared_gate=True,
  )
  return _hybrid_dense(config) | {'experts': sizes}


def _hybrid_dense(config):
  shape = llama.shape(config)
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
  step = config.size('full_attention_interval', 4)
  default = llama.all_but_every(step, num_layers)
  return llama.layers_of_kind(config, 'linear_attention', default, _KINDS)


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


def _parts(model: transformer.Transformer) -> tensors.Parts:
  """Divides what holds several parameters, in blocks of one head or of all."""
  delta = model.delta
  if delta is None:  # a target of another family than the folder's
    return {}
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
  found = {
    'self_attn.q_proj.weight': _of_rows(of_query, model.num_heads),
    'linear_attn.in_proj_qkv.weight': _of_rows(mixed),
    'linear_attn.in_proj_qkvz.weight': _of_rows(gated, heads),
    'linear_attn.in_proj_ba.weight': _of_rows(
      {'rate': group, 'decay': group}, heads
    ),
    # Others store [channels, kernel, 1], and have added 1 to the norms.
    _CONVOLUTION: _of_rows(mixed, order=(0, 2)),
  }
  found = {
    end: {f'{end}[{name}]': part for name, part in parts.items()}
    for end, parts in found.items()
  }
  if model.experts is not None:
    # A tensor of all experts holds the matrices of each one below the other.
    size, order = model.experts.mlp_dim, (1, 2, 0)
    found['experts.gate_up_proj'] = {
      'experts.*.gate_proj.weight': tensors.Part(order, 1, range(size)),
      'experts.*.up_proj.weight': tensors.Part(order, 1, range(size, 2 * size)),
    }
    found['experts.down_proj'] = {
      'experts.*.down_proj.weight': tensors.Part(order)
    }
  return found


def _of_rows(sizes: Mapping[str, int], count=1, order=(0, 1)):
  """Divides each of `count` blocks of rows into parts of these sizes."""
  start, found = 0, {}
  blocks = np.arange(count)[:, None] * sum(sizes.values())
  for part, size in sizes.items():
    rows = (blocks + start + np.arange(size)).reshape(-1)
    found[part] = tensors.Part(order, 0, rows)
    start += size
  return found


_make = functools.partial(
  family.Family,
  parts=_parts,
  check=_refuse_shifted,
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
