"""Llama models in Hugging Face's layout: config.json and safetensors."""

import contextlib
import functools
import os
import pathlib
from typing import Any

import safetensors

from specsample import files
from specsample.models import checkpoint
from specsample.models import layers
from specsample.models import llama
from specsample.types import Params

# Files of a hub repository that `load` and the tokenizer read.
FILE_PATTERNS = (
  'config.json',
  'generation_config.json',
  'model*.safetensors',
  'model.safetensors.index.json',
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)
PICKLE_SUFFIXES = ('.bin', '.pt', '.pth', '.pkl', '.ckpt')

_FAMILIES = ('llama', 'mistral')
_NAMES = {
  'embedding': 'model.embed_tokens.weight',
  'unembedding': 'lm_head.weight',
  'norm.scale': 'model.norm.weight',
  'layers.{}.attention_norm.scale': 'model.layers.{}.input_layernorm.weight',
  'layers.{}.attention.query.kernel': 'model.layers.{}.self_attn.q_proj.weight',
  'layers.{}.attention.query.bias': 'model.layers.{}.self_attn.q_proj.bias',
  'layers.{}.attention.key.kernel': 'model.layers.{}.self_attn.k_proj.weight',
  'layers.{}.attention.key.bias': 'model.layers.{}.self_attn.k_proj.bias',
  'layers.{}.attention.value.kernel': 'model.layers.{}.self_attn.v_proj.weight',
  'layers.{}.attention.value.bias': 'model.layers.{}.self_attn.v_proj.bias',
  'layers.{}.attention.out.kernel': 'model.layers.{}.self_attn.o_proj.weight',
  'layers.{}.attention.out.bias': 'model.layers.{}.self_attn.o_proj.bias',
  'layers.{}.mlp_norm.scale': (
    'model.layers.{}.post_attention_layernorm.weight'
  ),
  'layers.{}.mlp.gate.kernel': 'model.layers.{}.mlp.gate_proj.weight',
  'layers.{}.mlp.up.kernel': 'model.layers.{}.mlp.up_proj.weight',
  'layers.{}.mlp.down.kernel': 'model.layers.{}.mlp.down_proj.weight',
}
_DTYPES = ('F64', 'F32', 'F16', 'BF16')


def load(
  folder: str | os.PathLike[str], dtype: str
) -> tuple[llama.Llama, Params]:
  """The model in a folder and its parameters as `dtype`.

  Raises:
    ValueError: files are missing or damaged, or hold no model of the family.
  """
  checkpoint.check_dtype(dtype)
  folder = pathlib.Path(folder)
  model = _model(files.read_json(folder / 'config.json'), folder, dtype)
  # Computed from the configuration now, but stored by old checkpoints; and a
  # tied unembedding is sometimes stored all the same.
  ignored = {
    f'model.layers.{i}.self_attn.rotary_emb.inv_freq'
    for i in range(model.num_layers)
  }
  if model.tie_embeddings:
    ignored.add(_NAMES['unembedding'])
  with contextlib.ExitStack() as stack:
    tensors = _open(folder, stack)
    return model, checkpoint.fill(model, tensors, _NAMES, ignored=ignored)


def _open(
  folder: pathlib.Path, stack: contextlib.ExitStack
) -> checkpoint.TensorFile:
  shards: dict[str, Any] = {}
  for path in _shard_paths(folder):
    try:
      # Read, not mapped: mapped pages count as memory.
      shard = stack.enter_context(
        safetensors.safe_open(path, framework='numpy', backend='pread')
      )
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(
        f'{path} is no complete safetensors file ({error}): download it again'
      ) from error
    shards |= dict.fromkeys(shard.keys(), shard)
  slices = {name: shard.get_slice(name) for name, shard in shards.items()}
  for name, entry in slices.items():
    if entry.get_dtype() not in _DTYPES:
      raise ValueError(
        f'{folder}: tensor {name} is stored as {entry.get_dtype()}, supported '
        f'are {", ".join(_DTYPES)}: load a version that is not quantised'
      )
  return checkpoint.TensorFile(
    origin=str(folder),
    shapes={name: tuple(entry.get_shape()) for name, entry in slices.items()},
    read=lambda name: shards[name].get_tensor(name),
  )


def _shard_paths(folder: pathlib.Path) -> list[pathlib.Path]:
  single = folder / 'model.safetensors'
  if single.exists():
    return [single]
  index = folder / 'model.safetensors.index.json'
  if not index.exists():
    raise ValueError(_without_weights(folder))
  shard_of = files.read_json(index).get('weight_map')
  if not isinstance(shard_of, dict) or not shard_of:
    raise ValueError(f'{index} has no weight_map: download it again')
  paths = [folder / name for name in sorted(set(shard_of.values()))]
  absent = [path.name for path in paths if not path.exists()]
  if absent:
    raise ValueError(
      f'{folder} lacks {", ".join(absent)}, which {index.name} names: download '
      'what is missing'
    )
  return paths


def _without_weights(folder: pathlib.Path) -> str:
  for path in sorted(folder.iterdir()):
    if path.suffix in PICKLE_SUFFIXES:
      return pickle_message(path)
  return (
    f'{folder} holds neither model.safetensors nor its index: download the '
    'weights'
  )


def pickle_message(path: pathlib.Path) -> str:
  """Why a pickle is refused, and what to do."""
  return (
    f'{path} may be a pickle, which can run any code when it is read: convert '
    'it where it is trusted, with save_pretrained(..., safe_serialization='
    'True) of transformers, and load the folder that this writes'
  )


def _model(
  config: dict[str, Any], folder: pathlib.Path, dtype: str
) -> llama.Llama:
  origin = str(folder / 'config.json')
  family = config.get('model_type')
  if family not in _FAMILIES:
    raise ValueError(
      f'{origin}: model_type {family!r} is not supported, '
      f'{" and ".join(_FAMILIES)} are'
    )
  for key, supported in (
    ('hidden_act', 'silu'),
    ('mlp_bias', False),
    ('quantization_config', None),
  ):
    if config.get(key, supported) != supported:
      raise ValueError(
        f'{origin}: {key} is {config[key]!r}, supported is {supported!r} only'
      )
  size = functools.partial(checkpoint.size, config, origin=origin)
  flag = functools.partial(checkpoint.flag, config, origin=origin)
  num_heads = size('num_attention_heads')
  # 4096 is what transformers takes where a Mistral model does not say.
  window = config.get('sliding_window', 4096) if family == 'mistral' else None
  return llama.Llama(
    vocab_size=size('vocab_size'),
    num_layers=size('num_hidden_layers'),
    dim=size('hidden_size'),
    num_heads=num_heads,
    num_kv_heads=size('num_key_value_heads', default=num_heads),
    head_dim=size('head_dim', default=size('hidden_size') // num_heads),
    mlp_dim=size('intermediate_size'),
    max_length=size('max_position_embeddings'),
    **_rope(config, origin),
    norm_eps=checkpoint.number(
      config, 'rms_norm_eps', origin=origin, default=1e-6
    ),
    tie_embeddings=flag('tie_word_embeddings'),
    attention_bias=flag('attention_bias'),
    sliding_window=None
    if window is None
    else size('sliding_window', default=window),
    dtype=dtype,
  )


def _rope(config: dict[str, Any], origin: str) -> dict[str, Any]:
  """The arguments rope_theta and rope_scaling of a model.

  transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling,
  whose rope_type was once called type.
  """
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise ValueError(
      f'{origin}: the rope parameters are {rope!r}, expected an object: the '
      'file is damaged, or of another architecture'
    )
  rope = {'rope_theta': config.get('rope_theta', 10_000.0)} | rope
  number = functools.partial(checkpoint.number, rope, origin=origin)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  scaling: layers.LinearRope | layers.Llama3Rope | None = None
  if kind == 'linear':
    scaling = layers.LinearRope(factor=number('factor'))
  elif kind == 'llama3':
    scaling = layers.Llama3Rope(
      factor=number('factor'),
      low_freq_factor=number('low_freq_factor'),
      high_freq_factor=number('high_freq_factor'),
      original_max_length=checkpoint.size(
        rope, 'original_max_position_embeddings', origin=origin
      ),
    )
  elif kind != 'default':
    raise ValueError(
      f"{origin}: rope scaling {kind!r} is not supported: 'default', 'linear' "
      "and 'llama3' are"
    )
  return {'rope_theta': number('rope_theta'), 'rope_scaling': scaling}
