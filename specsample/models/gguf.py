"""Models in GGUF files; tensors are dequantised one at a time.

The header is parsed here, because the reader of package `gguf` takes seconds to
read a vocabulary and maps the file, whose pages then count as memory. The
package does the dequantisation.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import os
import pathlib
import re
import struct
from typing import Any

import gguf
import numpy as np

from specsample import files
from specsample.models import config as config_lib
from specsample.models import gemma
from specsample.models import llama
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
_ARCHITECTURES = ('llama', 'gemma3', 'qwen2', 'qwen3')
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
# `struct` codes by the format's numbers of scalar types.
_SCALARS = dict(enumerate('BbHhIif?')) | {10: 'Q', 11: 'q', 12: 'd'}


@dataclasses.dataclass(frozen=True)
class _Tensor:
  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  offset: int

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape of the tensor's bytes."""
    return gguf.quant_shape_to_byte_shape(self.shape, self.kind)


class Reader:
  """An open GGUF file.

  Attributes:
    path: path of the file.
    metadata: values by key; strings, numbers and lists of them.
    shapes: the shape of each tensor; matrices are [out, in].
  """

  def __init__(self, path: str | os.PathLike[str]):
    self.path = pathlib.Path(path)
    files.refuse_pointer(files.at(path))
    self._file = self.path.open('rb')
    try:
      self._size = os.fstat(self._file.fileno()).st_size
      self._read_header()
    # An array of arrays may be nested without end.
    except (ValueError, LookupError, struct.error, RecursionError) as error:
      self._file.close()
      raise ValueError(
        f'{path} is not a complete GGUF file ({error}): download it again'
      ) from error

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._file.close()

  def read(self, name: str) -> np.ndarray:
    """Returns the values of a tensor, as float32."""
    tensor = self._tensors[name]
    stored = np.empty(tensor.stored_shape, np.uint8)
    self._file.seek(tensor.offset)
    self._file.readinto(stored.data)
    try:
      return gguf.dequantize(stored, tensor.kind)
    except NotImplementedError as error:
      raise ValueError(
        f'{self.path}: tensor {name} is quantised as {tensor.kind.name}, '
        'which the package gguf does not decode: use another quantisation'
      ) from error

  def _read_header(self):
    if self._take(4) != b'GGUF':
      raise ValueError('it does not begin with GGUF')
    version = self._scalar('I')
    if version not in _VERSIONS:
      raise ValueError(f'version {version} is not among {_VERSIONS}')
    num_tensors, num_values = self._scalar('Q'), self._scalar('Q')
    self.metadata = {}
    for _ in range(num_values):
      key = self._string()
      self.metadata[key] = self._value(self._scalar('I'))
    infos = {self._string(): self._tensor_info() for _ in range(num_tensors)}
    alignment = self.metadata.get('general.alignment', 32)
    if type(alignment) is not int or alignment < 1:
      raise ValueError(f'general.alignment is {alignment!r}')
    start = -(-self._file.tell() // alignment) * alignment
    self._tensors = {
      name: dataclasses.replace(info, offset=start + info.offset)
      for name, info in infos.items()
    }
    self.shapes = {name: info.shape for name, info in infos.items()}
    for name, tensor in self._tensors.items():
      end = tensor.offset + math.prod(tensor.stored_shape)
      if end > self._size:
        raise ValueError(
          f'tensor {name} ends at byte {end} in a file of {self._size} bytes'
        )

  def _tensor_info(self):
    sizes = [self._scalar('Q') for _ in range(self._scalar('I'))]
    return _Tensor(
      shape=tuple(reversed(sizes)),
      kind=gguf.GGMLQuantizationType(self._scalar('I')),
      offset=self._scalar('Q'),
    )

  def _value(self, kind: int) -> Any:
    if kind == _STRING:
      return self._string()
    if kind == _ARRAY:
      kind, length = self._scalar('I'), self._scalar('Q')
      if kind in _SCALARS:
        code = _SCALARS[kind]
        data = self._take(length * struct.calcsize('<' + code))
        return list(struct.unpack(f'<{length}{code}', data))
      return [self._value(kind) for _ in range(length)]
    return self._scalar(_SCALARS[kind])

  def _string(self) -> str:
    return self._take(self._scalar('Q')).decode('utf-8')

  def _scalar(self, code: str):
    code = '<' + code
    return struct.unpack(code, self._take(struct.calcsize(code)))[0]

  def _take(self, num_bytes: int) -> bytes:
    # Compared first, because a damaged length may exceed the memory there is.
    data = self._file.read(num_bytes) if num_bytes <= self._size else b''
    if len(data) < num_bytes:
      raise ValueError(f'it ends within the header, at byte {self._size}')
    return data


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
  with Reader(path) as reader:
    architecture, model = model_of(reader, dtype)
    prepared = prepare(reader.metadata)
    read = lambda name: _rearranged(
      architecture, model, name, reader.read(name)
    )
    file = tensors.TensorFile(str(path), reader.shapes, read)
    params = tensors.fill(model, file, _NAMES, {_ROPE_FACTORS}, convert)
    return model, params, prepared


def _rearranged(architecture, model, name, values):
  if model.norm_offset and name.endswith('norm.weight'):
    return values - model.norm_offset  # GGUF stores scale + offset
  match = re.search(r'\.attn_([qk])\.', name)
  if architecture != 'llama' or match is None:
    return values
  # Its files interleave the two halves of a head that are rotated together.
  heads = model.num_heads if match[1] == 'q' else model.num_kv_heads
  pairs = values.reshape(heads, -1, 2, *values.shape[1:])
  return pairs.swapaxes(1, 2).reshape(values.shape)


def model_of(reader: Reader, dtype: str) -> tuple[str, transformer.Transformer]:
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
  values = {
    key.removeprefix(prefix): value
    for key, value in metadata.items()
    if key.startswith(prefix)
  }
  config = config_lib.Config(values, origin)
  if config.get('expert_count', int):
    raise ValueError(
      f'{origin} is a mixture of {values["expert_count"]} experts, which '
      'is not supported: load a dense model, or a folder of safetensors'
    )
  size, number = config.size, config.number
  dim, num_heads = size('embedding_length'), size('attention.head_count')
  head_dim = size('attention.key_length', max(dim // num_heads, 1))
  # llama.vocab_size is optional.
  tokens = metadata.get('tokenizer.ggml.tokens')
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
    'sliding_window': config.optional_size('attention.sliding_window'),
    'dtype': dtype,
  }
  if architecture == 'gemma3':
    fields |= _gemma3(config, fields)
  return architecture, transformer.Transformer(**fields)


def _gemma3(config, fields):
  """Returns the fields that llama.cpp knows and the file does not state."""
  num_layers = fields['num_layers']
  step = config.size('attention.sliding_window_pattern', 6)
  per_head = fields['head_dim']
  if num_layers == 62:  # the 27B model
    per_head = fields['dim'] / fields['num_heads']
  return gemma.fields(fields['dim']) | {
    'sliding_layers': llama.all_but_every(step, num_layers),
    'sliding_rope_theta': config.number('rope.freq_base_swa', 10_000.0),
    'query_scale': per_head**-0.5,
  }


def _rope_scaling(config, head_dim, reader):
  rotated = config.get('rope.dimension_count', int, head_dim)
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
  kind = config.get('rope.scaling.type', str, 'linear' if key else 'none')
  if kind == 'none':
    return None
  if kind != 'linear' or key is None:
    raise ValueError(
      f"{reader.path}: rope scaling is {kind!r}, but only 'linear' with a "
      "factor and Llama 3.1's factors are supported"
    )
  return rotary.LinearRope(factor=config.number(key))
