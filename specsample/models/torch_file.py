"""A reader of PyTorch's zip format that runs no code from its pickle.

`torch.save` writes an archive with a pickle, which describes the tensors, and
with their bytes. A pickle may call anything; here it may only make tensors and
dicts of them.
"""

import dataclasses
import io
import math
import pickle
import struct
from typing import Any
import zipfile

from etils import epath

from specsample import files
from specsample.models import safetensors_file

# Storage types and the names of their dtypes in the safetensors format.
_KINDS = {
  'DoubleStorage': 'F64',
  'FloatStorage': 'F32',
  'HalfStorage': 'F16',
  'BFloat16Storage': 'BF16',
  'LongStorage': 'I64',
  'IntStorage': 'I32',
  'BoolStorage': 'BOOL',
}
# The local header of a zip entry: the size of its fixed part, and the position
# in it of two 2-byte lengths, those of the fields after it.
_HEADER_BYTES = 30
_LENGTHS = slice(26, 30)
# Errors that damaged archives and pickles raise.
_ERRORS = (
  pickle.UnpicklingError,
  zipfile.BadZipFile,
  struct.error,
  *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
  *(OverflowError, RecursionError, MemoryError, NotImplementedError),
)


def read_header(path: epath.Path) -> dict[str, safetensors_file.Tensor]:
  """Returns the tensors of a state dict by name; reads no weights."""
  files.refuse_pointer(path)
  try:
    with path.open('rb') as file, zipfile.ZipFile(file) as archive:
      entries = {info.filename: info for info in archive.infolist()}
      (name,) = [name for name in entries if name.endswith('/data.pkl')]
      content = _Unpickler(io.BytesIO(archive.read(name))).load()
      if not isinstance(content, dict):
        raise ValueError(
          f'its content is of type {type(content).__name__}, not a state dict'
        )
      folder = name.removesuffix('data.pkl')
      order = entries.get(f'{folder}byteorder')
      if order is not None and archive.read(order) != b'little':
        raise ValueError('its numbers are big-endian')
      return {
        key: _tensor(path, file, entries, folder, (key, value))
        for key, value in content.items()
      }
  except _ERRORS as error:
    reason = ' '.join(str(error).split()) or type(error).__name__
    raise ValueError(
      f'{path} does not hold named tensors as torch.save writes them '
      f'({reason}): download it again, or save a state_dict with torch 1.6 or '
      'later'
    ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
  kind: str
  key: str
  size: int  # in elements


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


class _MakeView:
  """A replacement for torch's function; no pickle can change an instance."""

  __slots__ = ()

  def __call__(self, storage, offset, shape, strides, *others) -> _View:
    del others  # gradients and hooks
    if not isinstance(storage, _Storage):
      raise ValueError('a tensor has no storage')
    return _View(storage, offset, tuple(shape), tuple(strides))


class _MakeDict:
  """A replacement for collections.OrderedDict."""

  __slots__ = ()

  def __call__(self, items=()) -> '_Dict':
    return _Dict(items)


class _Dict(dict):
  """A dict that accepts the attributes of a state dict and drops them."""

  __slots__ = ()

  def __setstate__(self, state):
    del state


class _Unpickler(pickle.Unpickler):
  """An unpickler that accepts only what torch.save writes for a state dict."""

  def find_class(self, module, name):
    if (module, name) == ('torch._utils', '_rebuild_tensor_v2'):
      return _MakeView()
    if (module, name) == ('collections', 'OrderedDict'):
      return _MakeDict()
    if module == 'torch' and name in _KINDS:
      return _KINDS[name]
    raise pickle.UnpicklingError(
      f'its pickle asks for {module}.{name}, which is refused because it could '
      'run code'
    )

  def persistent_load(self, pid: Any) -> _Storage:
    label, kind, key, _, size = pid
    if label != 'storage' or kind not in _KINDS.values():
      raise ValueError(f'it has a storage of unknown kind {kind}')
    return _Storage(kind, str(key), int(size))


def _tensor(path, file, entries, folder, item) -> safetensors_file.Tensor:
  name, view = item
  if not isinstance(name, str) or not isinstance(view, _View):
    raise ValueError(
      f'{name!r} is of type {type(view).__name__}, not a named tensor'
    )
  storage, shape = view.storage, view.shape
  width = safetensors_file.DTYPES[storage.kind].itemsize
  info = entries[f'{folder}data/{storage.key}']
  if info.compress_type != zipfile.ZIP_STORED:
    raise ValueError(f'tensor {name} is compressed')
  if info.file_size < storage.size * width:
    raise ValueError(f'tensor {name} has only {info.file_size} bytes')
  numbers = (*shape, view.offset)
  if any(type(number) is not int or number < 0 for number in numbers):
    raise ValueError(f'tensor {name} has shape {shape} at offset {view.offset}')
  by_rows = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
  strides = zip(shape, view.strides, by_rows, strict=True)
  if any(size > 1 and found != wanted for size, found, wanted in strides):
    raise ValueError(
      f'tensor {name} of shape {shape} has strides {view.strides}: save it '
      'with .contiguous()'
    )
  if view.offset + math.prod(shape) > storage.size:
    raise ValueError(f'tensor {name} ends after the end of its storage')
  file.seek(info.header_offset)
  header = file.read(_HEADER_BYTES)
  first = info.header_offset + _HEADER_BYTES
  first += sum(struct.unpack('<HH', header[_LENGTHS]))
  return safetensors_file.Tensor(
    path, storage.kind, shape, first + view.offset * width
  )
