"""A drafter's layers, in the names and settings of Hugging Face."""

import dataclasses
from typing import Any

from specsample.loading.published import source as source_lib
from specsample.loading.published import writing
from specsample.models import config as config_lib
from specsample.models import gemma
from specsample.models import llama
from specsample.models import qwen
from specsample.models import transformer

# Settings that other engines support, with the only value supported here.
_ONLY = {
  'hidden_act': 'silu',
  'quantization_config': None,
  'attention_sink_bias': False,
  'add_swa_attention_sink_bias': False,
  'attention_value_scale': 1,
  'is_neox_style': True,
  'rope_is_neox_style': True,
  'logit_scale': 1,
}
_LARGEST_WINDOW = 2**31 - 1  # that of positions
_GEMMA4 = ('gemma4_text', 'gemma4_unified_text')
_POST_NORM = 'post_feedforward_layernorm.weight'
# Tensors of layers that are not supported in drafters, and what they are.
_OTHERS = {
  _POST_NORM: "norms after attention and feed-forward, as Gemma 2's and 3's",
  'self_attn.sinks': "attention sinks, as gpt-oss's",
  'self_attn.kv_a_proj_with_mqa.weight': "latent attention, as DeepSeek's",
  'mlp.gate.weight': 'a mixture of experts',
  'mlp.router.weight': 'a mixture of experts',
  'block_sparse_moe.gate.weight': 'a mixture of experts',
  'linear_attn.A_log': "a recurrence, as Qwen3.5's",
}


def table(
  ours: str, theirs: str, like: transformer.Transformer | None = None
) -> dict[str, str]:
  """Returns the table of a layer, given the prefixes of paths and tensors.

  `like` is what `config_of` has returned; the layers are Llama's if it is None.
  """
  is_gemma = like is not None and like.has_post_norms
  of_family = dict(gemma.GEMMA4.names if is_gemma else llama.NAMES)
  part = 'layers.{}.attention.'
  if like is not None and like.values_are_keys:
    of_family[part + 'value.kernel'] = of_family[part + 'key.kernel']
  return {
    ours + name.removeprefix('layers.{}.'): theirs
    + tensor.removeprefix('model.layers.{}.')
    for name, tensor in of_family.items()
    if name.startswith('layers.')
  }


def config_of(
  source: source_lib.Source,
  config: config_lib.Config,
  layer: str,
) -> transformer.Transformer:
  """Returns a model whose layers are like the drafter's.

  The tensors, whose names begin with `layer`, tell which products have a bias
  and whether queries and keys have norms, because a drafter's configuration is
  often a copy of the target's.

  Layers with norms after attention and feed-forward are Gemma 4's, as DeepSpec
  trains them for that family; others are Llama's or Qwen's. The `logit_softcap`
  of Gemma 4's is that of the drafter's own unembedding.
  """
  model, model_type = source.target.model, config.get('model_type', str)
  is_gemma4 = model_type in _GEMMA4
  _refuse_others(source, config, layer, is_gemma4)
  of_blocks = source.config.part('dflash_config')
  for key, supported in _ONLY.items():
    for part in (config, source.config, of_blocks):
      part.only(key, supported)
  for part in (source.config, of_blocks):
    part.only('target_hidden_size', model.dim)
  # Defaults for settings that drafters leave out, or copy from a target.
  given: dict[str, Any] = {
    **llama.DEFAULTS,
    'vocab_size': model.vocab_size,
    'num_hidden_layers': 1,
    'max_position_embeddings': model.max_length,
  }
  if is_gemma4:
    return _gemma4(source, config, layer, given)
  if config.get('hidden_act', str) is None:
    config.only('hidden_activation', 'silu')
  if model_type == 'qwen3':
    given['head_dim'] = qwen.QWEN3.defaults['head_dim']
  config = _filled(config, given)
  shape = llama.shape(config)
  if shape['dim'] != model.dim:
    raise ValueError(
      f'{config.origin}: hidden_size is {shape["dim"]}, but the vectors of the '
      f'target have {model.dim} numbers, and layers of another width '
      'are not supported: load the target that the drafter was trained for'
    )
  sliding = _sliding_layers(config, of_blocks, shape['num_layers'])
  has = lambda name: f'{layer}self_attn.{name}' in source.tensors
  return transformer.Transformer(
    **shape,
    dtype=model.dtype,
    **_rope(config, len(sliding), shape['num_layers']),
    sliding_window=_window(config, of_blocks) if sliding else None,
    sliding_layers=sliding if len(sliding) < shape['num_layers'] else None,
    attention_bias=has('q_proj.bias'),
    attention_out_bias=has('o_proj.bias'),
    qk_norm=has('q_norm.weight'),
  )


def _refuse_others(source, config, layer, is_gemma4):
  """Raises ValueError if the layers are of a family that is not supported.

  The tensors tell: model_type may be the target's although the layers are
  Llama's.
  """
  kinds, model_type = dict(_OTHERS), config.get('model_type', str)
  if is_gemma4:
    del kinds[_POST_NORM]
  query, out = (f'self_attn.{part}_proj.weight' for part in ('q', 'o'))
  if {layer + query, layer + out} <= source.tensors.keys():
    width, *_ = source.shape(layer + query)
    if width == 2 * source.shape(layer + out)[-1]:
      kinds[query] = "an output gate, as Qwen3.5's"
  for tensor, kind in kinds.items():
    if layer + tensor in source.tensors:
      raise ValueError(
        f'{config.origin}: model_type is {model_type!r}, and the '
        f"drafter's layers have {kind} (tensor {layer + tensor}): give a "
        'drafter whose layers are like those of Llama, Qwen 2, Qwen 3 or, with '
        f'model_type {_GEMMA4[0]}, Gemma 4'
      )


def _filled(config, given):
  values = {key: x for key, x in config.values.items() if x is not None}
  return dataclasses.replace(config, values=given | values)


def _gemma4(source, config, layer, given):
  """Like `config_of`, for layers of Gemma 4; the tensors tell their sizes."""
  source.config.part('dflash_config').only('use_swa', False)
  head_dim, *_ = source.shape(f'{layer}self_attn.q_norm.weight')
  width, *_ = source.shape(f'{layer}self_attn.k_proj.weight')
  config, model = _filled(config, given), source.target.model
  made = gemma.drafter_layers(
    config, model.dtype, head_dim, max(width // head_dim, 1)
  )
  source.refuse_other_target(
    'final_logit_softcapping', made.logit_softcap, model.logit_softcap
  )
  return made


def settings(request: writing.Request, model_type: str) -> dict[str, Any]:
  """Returns the settings that `config_of` reads as a drafter's layers.

  Layers of `model_type` 'qwen3' normalise queries and keys, those of 'llama' do
  not.
  """
  shape, windows = request.drafter.shape, request.drafter.windows
  has_norms = model_type == 'qwen3'
  if shape.qk_norm != has_norms:
    raise request.no_room(
      f'qk_norm = {shape.qk_norm}',
      f'train with a layer_config that has qk_norm = {has_norms}',
    )
  if shape.attention_bias != shape.attention_out_bias:
    raise request.no_room(
      f'attention_bias = {shape.attention_bias} beside attention_out_bias = '
      f'{shape.attention_out_bias}',
      'train with a layer_config that has both or neither',
    )
  found = {
    'model_type': model_type,
    'hidden_act': 'silu',
    'hidden_size': shape.dim,
    'intermediate_size': shape.mlp_dim,
    'num_attention_heads': shape.num_heads,
    'num_key_value_heads': shape.num_kv_heads,
    'head_dim': shape.head_dim,
    'num_hidden_layers': len(windows),
    'vocab_size': request.drafter.model.vocab_size,
    'max_position_embeddings': shape.max_length,
    'rms_norm_eps': shape.norm_eps,
    'attention_bias': shape.attention_bias,
    'tie_word_embeddings': False,
    **llama.rope_settings(shape),
  }
  sizes = {window for window in windows if window is not None}
  if has_norms or sizes:
    found['layer_types'] = [
      'full_attention' if window is None else 'sliding_attention'
      for window in windows
    ]
    found['use_sliding_window'] = bool(sizes)
    found['sliding_window'] = max(sizes, default=None)
  return found


def _sliding_layers(config, of_blocks, num_layers):
  """Returns the layers with a window.

  `use_swa`, in the settings of a DFlash drafter, gives all layers one if no
  layer is named.
  """
  named: tuple[int, ...] = ()
  is_used = config.flag('use_sliding_window')
  if is_used or config.get('layer_types', list[str]) is not None:
    named = qwen.sliding_layers(config, num_layers)
  if not named and of_blocks.flag('use_swa'):
    return tuple(range(num_layers))
  if named and not config.flag('use_sliding_window', True):
    raise ValueError(
      f'{config.origin}: use_sliding_window is False, but layer_types is '
      f'{config.values.get("layer_types")}: set use_sliding_window to true, or '
      "all layers to 'full_attention'"
    )
  return named


def _window(config, of_blocks):
  """Returns how many tokens a token sees, itself included."""
  key = 'sliding_window'
  if of_blocks.get('swa_window_size', int) is not None:
    config, key = of_blocks, 'swa_window_size'
  if config.size(key) > _LARGEST_WINDOW:
    raise config.unexpected(key, f'an integer from 1 to {_LARGEST_WINDOW}')
  return config.size(key)


def _rope(config, num_sliding, num_layers):
  """Returns the rope's fields; transformers 5 may write them per layer type."""
  if not llama.ropes(config):
    return llama.rope(config)
  of_kinds = config.part('rope_parameters')
  of = lambda kind: llama.rope_of(of_kinds.part(kind))
  full, sliding = 'full_attention', 'sliding_attention'
  if num_sliding in (0, num_layers):
    return of(sliding if num_sliding else full)
  if of(sliding) == of(full):
    return of(full)
  if of(sliding)['rope_scaling'] is not None:
    raise of_kinds.unexpected(
      sliding, 'the rope of full_attention, or one that is not scaled'
    )
  return of(full) | {'sliding_rope_theta': of(sliding)['rope_theta']}
