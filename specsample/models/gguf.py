"""Models in GGUF files; `gguf_file` reads the format."""

from collections.abc import Callable, Mapping
import functools
import os
import re
from typing import Any

import numpy as np

from specsample.models import config as config_lib
from specsample.models import gemma
from specsample.models import gguf_file
from specsample.models import rotary
from specsample.models import tensors
from specsample.models import transformer
from specsample.types import Params

_NAMES = {
  'embedding': 'token_embd.weight',
  'unembedding': 'output.weight',
  'norm.scale': 'output_norm.weight',
  'layers.{}.attention_norm.scale': 'blk.{}.attn_norm.weight',
  'layers.{}.attention.query.kernel': 'blk.{}.attn_q.weight',
  'layers.{}.attention.query.bias': 'blk.{}.attn_q.bias',
  'layers.{}.attention.query_norm.scale': 'blk.{}.attn_q_norm.weight',
  'layers.{}.attention.key.kernel': 'blk.{}.attn_k.weight',
  'layers.{}.attention.key.bias': 'blk.{}.attn_k.bias',
  'layers.{}.attention.key_norm.scale': 'blk.{}.attn_k_norm.weight',
  'layers.{}.attention.value.kernel': 'blk.{}.attn_v.weight',
  'layers.{}.attention.value.bias': 'blk.{}.attn_v.bias',
  'layers.{}.attention.out.kernel': 'blk.{}.attn_output.weight',
  'layers.{}.attention.out.bias': 'blk.{}.attn_output.bias',
  'layers.{}.attention_post_norm.scale': 'blk.{}.post_attention_norm.weight',
  'layers.{}.mlp_norm.scale': 'blk.{}.ffn_norm.weight',
  'layers.{}.mlp.gate.kernel': 'blk.{}.ffn_gate.weight',
  'layers.{}.mlp.up.kernel': 'blk.{}.ffn_up.weight',
  'layers.{}.mlp.down.kernel': 'blk.{}.ffn_down.weight',
  'layers.{}.mlp_post_norm.scale': 'blk.{}.post_ffw_norm.weight',
}
# Llama 3.1's divisors of rotary frequencies: configuration, not a parameter.
_ROPE_FACTORS = 'rope_freqs.weight'


def load(
  path: str | os.PathLike[str],
  dtype: str,
  convert: tensors.Convert | None,
  prepare: Callable[[Mapping[str, Any]], Any] = lambda metadata: metadata,
) -> tuple[transformer.Transformer, Params, Any]:
  """Returns the model, its parameters dequantised to `dtype`, and `prepare`'s.

  `prepare` makes of the metadata what is returned; it is called before any
  weight is read, so that what it refuses costs little.

  On a mesh each process dequantises whole tensors and keeps its parts. See
  `tensors.fill` for `convert`.
  """
  dtype = config_lib.dtype_name(dtype)
  with gguf_file.Reader(path) as reader:
    architecture, model = model_of(reader, dtype)
    prepared = prepare(reader.metadata)
    rearranged = functools.partial(_rearranged, architecture, model)
    file = tensors.TensorFile(
      origin=str(path),
      shapes=reader.shapes,
      open=lambda name: rearranged(name, reader.read(name)),
    )
    params = tensors.fill(model, file, _NAMES, {_ROPE_FACTORS}, convert)
    return model, params, prepared


def _rearranged(architecture, model, name, values):
  if architecture == 'llama':
    return _heads_split(name, values, model)
  if model.norm_offset and name.endswith('norm.weight'):
    return values - model.norm_offset  # GGUF stores scale + offset
  return values


def _heads_split(name: str, values: np.ndarray, model: transformer.Transformer):
  """Orders the rows of query and key heads as `rotary.rotate` expects them.

  GGUF interleaves the two halves of a head that are rotated together.
  """
  match = re.search(r'\.attn_([qk])\.', name)
  if match is None:
    return values
  heads = model.num_heads if match[1] == 'q' else model.num_kv_heads
  pairs = values.reshape(heads, -1, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def model_of(
  reader: gguf_file.Reader, dtype: str
) -> tuple[str, transformer.Transformer]:
  """Returns the architecture and the model; ValueError if it is not known."""
  metadata, shapes, origin = reader.metadata, reader.shapes, str(reader.path)
  architecture = metadata.get('general.architecture')
  if architecture not in _ARCHITECTURES:
    raise ValueError(
      f'{origin}: architecture is {architecture!r}, but the supported '
      f'architectures are {", ".join(_ARCHITECTURES)}'
    )
  if metadata.get('split.count', 0) not in (0, 1):
    raise ValueError(
      f'{origin} is one of {metadata["split.count"]} parts: join them with '
      '`llama-gguf-split --merge`'
    )
  prefix = f'{architecture}.'
  config = config_lib.Config(
    {
      key.removeprefix(prefix): value
      for key, value in metadata.items()
      if key.startswith(prefix)
    },
    origin,
  )
  if config.get('expert_count'):
    raise ValueError(
      f'{origin} is a mixture of {config.get("expert_count")} experts, which '
      'is not supported: load a dense model, or a folder of safetensors'
    )
  size, number = config.size, config.number
  dim, num_heads = size('embedding_length'), size('attention.head_count')
  head_dim = size('attention.key_length', max(dim // num_heads, 1))
  # llama.vocab_size is optional.
  tokens = metadata.get('tokenizer.ggml.tokens')
  window = 'attention.sliding_window'
  fields = {
    'vocab_size': (
      len(tokens) if isinstance(tokens, list) else size('vocab_size')
    ),
    # Every layer has some tensors.
    'num_layers': config.layers('block_count', most=len(shapes)),
    'dim': dim,
    'num_heads': num_heads,
    'num_kv_heads': size('attention.head_count_kv', num_heads),
    'head_dim': head_dim,
    'mlp_dim': size('feed_forward_length'),
    'max_length': size('context_length'),
    'rope_theta': number('rope.freq_base', 10_000.0),
    'rope_scaling': _rope_scaling(config, head_dim, reader),
    'norm_eps': number('attention.layer_norm_rms_epsilon', 1e-5),
    'tie_embeddings': 'output.weight' not in shapes,
    'attention_bias': 'blk.0.attn_q.bias' in shapes,
    'attention_out_bias': 'blk.0.attn_output.bias' in shapes,
    'qk_norm': 'blk.0.attn_q_norm.weight' in shapes,
    'sliding_window': size(window) if config.get(window) is not None else None,
    'dtype': dtype,
  }
  own = _ARCHITECTURES[architecture](config, fields)
  return architecture, transformer.Transformer(**fields | own)


def _gemma3(config, fields):
  """Returns the fields that llama.cpp knows and the file does not state."""
  num_layers = fields['num_layers']
  step = config.size('attention.sliding_window_pattern', 6)
  # (dim / num_heads)**-0.5 for the 27B model, head_dim**-0.5 for the others.
  per_head = fields['dim'] / fields['num_heads']
  return gemma.fields(fields['dim']) | {
    'sliding_layers': gemma.sliding_layers(num_layers, step),
    'sliding_rope_theta': config.number('rope.freq_base_swa', 10_000.0),
    'query_scale': (
      per_head if num_layers == _GEMMA3_27B_LAYERS else fields['head_dim']
    )
    ** -0.5,
  }


_GEMMA3_27B_LAYERS = 62
_ARCHITECTURES = {
  'llama': lambda config, fields: {},
  'gemma3': _gemma3,
  'qwen2': lambda config, fields: {},
  'qwen3': lambda config, fields: {},
}


def _rope_scaling(config, head_dim, reader):
  rotated = config.get('rope.dimension_count', head_dim)
  if rotated != head_dim:
    raise ValueError(
      f'{reader.path}: {rotated} of {head_dim} dimensions are rotated, which '
      'is not supported: load a model that rotates all dimensions'
    )
  if _ROPE_FACTORS in reader.shapes:
    factors = reader.read(_ROPE_FACTORS)
    if factors.shape != (head_dim // 2,):
      raise ValueError(
        f'{reader.path}: {_ROPE_FACTORS} has shape {factors.shape}, expected '
        f'{(head_dim // 2,)}: convert the model again'
      )
    return rotary.FactorRope(factors=tuple(factors.tolist()))
  # The first is the factor's name from before there were types.
  keys = ('rope.scale_linear', 'rope.scaling.factor')
  key = next((key for key in keys if config.has(key)), None)
  kind = config.get('rope.scaling.type', 'linear' if key else 'none')
  if kind == 'none':
    return None
  if kind != 'linear' or key is None:
    raise ValueError(
      f"{reader.path}: rope scaling is {kind!r}, but only 'linear' with a "
      "factor and Llama 3.1's factors are supported"
    )
  return rotary.LinearRope(factor=config.number(key))
