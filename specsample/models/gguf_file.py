"""The GGUF format: metadata, and tensors dequantised one at a time.

The header is parsed here, because the reader of package `gguf` takes seconds to
read a vocabulary and maps the file, whose pages then count as memory. The
package does the dequantisation.
"""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

import gguf
import numpy as np

from specsample import files

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
    stored: for each tensor, the name of its quantisation and its size in bytes.
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
    try:
      return gguf.dequantize(self._read_bytes(tensor), tensor.kind)
    except NotImplementedError as error:
      raise ValueError(
        f'{self.path}: tensor {name} is quantised as {tensor.kind.name}, '
        'which the package gguf does not decode: use another quantisation'
      ) from error

  def _read_bytes(self, tensor):
    stored = np.empty(tensor.stored_shape, np.uint8)
    self._file.seek(tensor.offset)
    self._file.readinto(stored.data)
    return stored

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
    self.stored = {
      name: (info.kind.name, math.prod(info.stored_shape))
      for name, info in infos.items()
    }
    for name, tensor in self._tensors.items():
      end = tensor.offset + self.stored[name][1]
      if end > self._size:
        raise ValueError(
          f'tensor {name} ends at byte {end} in a file of {self._size} bytes'
        )

  def _tensor_info(self):
    num_dims = self._scalar('I')
    sizes = [self._scalar('Q') for _ in range(num_dims)]
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
