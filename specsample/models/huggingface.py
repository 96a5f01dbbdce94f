"""Llama models in Hugging Face's layout: config.json and safetensors."""

from concurrent import futures
import functools
import os
from typing import Any

from etils import epath

from specsample import files
from specsample.models import config as config_lib
from specsample.models import rotary
from specsample.models import safetensors_file
from specsample.models import tensors
from specsample.models import transformer
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
NAMES = {
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
# How many modules for multi-token prediction lie behind the layers.
NUM_MODULES = 'num_nextn_predict_layers'
# Headers that are asked of a bucket at a time.
_NUM_THREADS = 16


def load(
  path: str | os.PathLike[str], dtype: str
) -> tuple[transformer.Transformer, Params]:
  """The model in a folder and its parameters as `dtype`.

  On a mesh each process reads the parts that its devices hold.

  Raises:
    ValueError: files are missing or damaged, or hold no model of the family.
  """
  config_lib.check_dtype(dtype)
  folder = files.at(path)
  config = files.read_json(folder / 'config.json')
  model = _model(config, folder, dtype)
  tensor_file = open_tensors(folder)
  # Computed from the configuration now, but stored by old checkpoints; and a
  # tied unembedding is sometimes stored all the same.
  ignored = {
    f'model.layers.{i}.self_attn.rotary_emb.inv_freq'
    for i in range(model.num_layers)
  }
  if model.tie_embeddings:
    ignored.add(NAMES['unembedding'])
  # A drafter that lies behind the layers: `mtp_files` reads it.
  behind = mtp_prefixes(model.num_layers, config.get(NUM_MODULES))
  ignored.update(filter(lambda x: x.startswith(behind), tensor_file.shapes))
  return model, tensors.fill(model, tensor_file, NAMES, ignored=ignored)


def mtp_prefixes(num_layers: int, count: Any) -> tuple[str, ...]:
  """How the names of so many modules begin, of none unless it is a number."""
  if not isinstance(count, int):
    return ()
  return tuple(f'model.layers.{num_layers + i}.' for i in range(count))


def open_tensors(folder: epath.Path) -> tensors.TensorFile:
  """The tensors of all safetensors files of a folder; no weight is read."""
  found: dict[str, safetensors_file.Tensor] = {}
  with futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    paths = _shard_paths(folder)
    for header in pool.map(safetensors_file.read_header, paths):
      found |= header
  supported = safetensors_file.WEIGHT_DTYPES
  for name, tensor in found.items():
    if tensor.kind not in supported:
      raise ValueError(
        f'{folder}: tensor {name} is stored as {tensor.kind}, supported are '
        f'{", ".join(supported)}: load a version that is not quantised'
      )
  return tensors.TensorFile(
    origin=str(folder),
    shapes={name: tensor.shape for name, tensor in found.items()},
    open=found.__getitem__,
  )


def _shard_paths(folder: epath.Path) -> list[epath.Path]:
  single = folder / 'model.safetensors'
  if single.exists():
    return [single]
  index = folder / 'model.safetensors.index.json'
  if not index.exists():
    raise ValueError(_without_weights(folder))
  shard_of = files.read_json(index).get('weight_map')
  if not isinstance(shard_of, dict) or not shard_of:
    raise ValueError(f'{index} has no weight_map: download it again')
  # Listed at once, because a bucket answers a question in some 50 ms.
  present = {path.name for path in folder.iterdir()}
  names = sorted(set(shard_of.values()))
  absent = [name for name in names if name not in present]
  if absent:
    raise ValueError(
      f'{folder} lacks {", ".join(absent)}, which {index.name} names: download '
      'what is missing'
    )
  return [folder / name for name in names]


def _without_weights(folder: epath.Path) -> str:
  for path in sorted(folder.iterdir()):
    if path.suffix in PICKLE_SUFFIXES:
      return pickle_message(path)
  return (
    f'{folder} holds neither model.safetensors nor its index: download the '
    'weights'
  )


def pickle_message(path: epath.Path) -> str:
  """Why a pickle is refused, and what to do."""
  return (
    f'{path} may be a pickle, which can run any code when it is read: convert '
    'it where it is trusted, with save_pretrained(..., safe_serialization='
    'True) of transformers, and load the folder that this writes'
  )


def _model(
  config: dict[str, Any], folder: epath.Path, dtype: str
) -> transformer.Transformer:
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
  size = functools.partial(config_lib.size, config, origin=origin)
  flag = functools.partial(config_lib.flag, config, origin=origin)
  num_heads = size('num_attention_heads')
  # 4096 is what transformers takes where a Mistral model does not say.
  window = config.get('sliding_window', 4096) if family == 'mistral' else None
  return transformer.Transformer(
    vocab_size=size('vocab_size'),
    num_layers=size('num_hidden_layers'),
    dim=size('hidden_size'),
    num_heads=num_heads,
    num_kv_heads=size('num_key_value_heads', default=num_heads),
    head_dim=size('head_dim', default=size('hidden_size') // num_heads),
    mlp_dim=size('intermediate_size'),
    max_length=size('max_position_embeddings'),
    **_rope(config, origin),
    norm_eps=config_lib.number(
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
  number = functools.partial(config_lib.number, rope, origin=origin)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  scaling: rotary.LinearRope | rotary.Llama3Rope | None = None
  if kind == 'linear':
    scaling = rotary.LinearRope(factor=number('factor'))
  elif kind == 'llama3':
    scaling = rotary.Llama3Rope(
      factor=number('factor'),
      low_freq_factor=number('low_freq_factor'),
      high_freq_factor=number('high_freq_factor'),
      original_max_length=config_lib.size(
        rope, 'original_max_position_embeddings', origin=origin
      ),
    )
  elif kind != 'default':
    raise ValueError(
      f"{origin}: rope scaling {kind!r} is not supported: 'default', 'linear' "
      "and 'llama3' are"
    )
  return {'rope_theta': number('rope_theta'), 'rope_scaling': scaling}
