"""The safetensors format, with partial reads from local files and buckets.

A JSON header says where in the file each array is. The format's own package
reads and writes only local files.
"""

from collections.abc import Collection, Mapping
import dataclasses
import json
import math
from typing import Any

from etils import epath
import jax.numpy as jnp
import numpy as np

from specsample import files

# Dtypes by their names in the format: those of weights that are not quantised,
# and those that can be read and written. Scales are stored beside quantised
# matrices (`models.quantised`).
WEIGHT_DTYPES = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': np.dtype(jnp.bfloat16),
}
DTYPES = WEIGHT_DTYPES | {
  'I32': np.dtype('<i4'),
  'I64': np.dtype('<i8'),
  'BOOL': np.dtype(np.bool_),
  'U8': np.dtype(np.uint8),
  'F8_E4M3': np.dtype(jnp.float8_e4m3fn),
}
# The format's own limit on a header, so that a damaged length cannot ask for
# all memory.
_MAX_HEADER_BYTES = 100_000_000
# Rows are read in blocks of this size if only parts of them are wanted.
_BLOCK_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Tensor:
  """An array in a file; indexing it by a slice per axis reads that part."""

  path: epath.Path
  kind: str  # the dtype's name in the format
  shape: tuple[int, ...]
  offset: int  # of its first byte in the file

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns that part of the array; only its rows are read."""
    rows, *columns = index
    first, last, _ = rows.indices(self.shape[0])
    sizes = [
      len(range(*part.indices(size)))
      for part, size in zip(columns, self.shape[1:], strict=True)
    ]
    if tuple(sizes) == self.shape[1:]:
      return self._rows(first, last)
    values = np.empty((last - first, *sizes), DTYPES[self.kind])
    row_bytes = math.prod(self.shape[1:]) * values.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(first, last, step):
      block = self._rows(start, min(start + step, last))
      values[start - first :][: len(block)] = block[:, *columns]
    return values

  def _rows(self, first, last):
    values = np.empty((last - first, *self.shape[1:]), DTYPES[self.kind])
    row_bytes = math.prod(self.shape[1:]) * values.itemsize
    start = self.offset + first * row_bytes
    files.read_into(self.path, start, values.reshape(-1).view(np.uint8).data)
    return values


def read_header(path: epath.Path) -> dict[str, Tensor]:
  """Returns a file's arrays by name; only those of `DTYPES` can be read."""
  files.refuse_pointer(path)
  try:
    size = files.size(path)
    start = 8 + int.from_bytes(_read(path, 0, 8), 'little')
    if start > min(size, _MAX_HEADER_BYTES):
      raise ValueError(
        f'its header ends at byte {start} in a file of {size} bytes'
      )
    header = json.loads(_read(path, 8, start))
    header.pop('__metadata__', None)
    tensors = {
      name: _tensor(path, name, entry, start, size)
      for name, entry in header.items()
    }
    _check_places(header, size - start)
    return tensors
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{path} is not a complete safetensors file ({error}): download it again'
    ) from error


def check_kinds(
  origin: epath.Path | str,
  tensors: Mapping[str, Tensor],
  supported: Collection[str],
) -> None:
  """Raises ValueError, naming a tensor, unless all have supported dtypes."""
  for name, tensor in tensors.items():
    if tensor.kind not in supported:
      raise ValueError(
        f'{origin}: tensor {name} is stored as {tensor.kind}, but the '
        f'supported types are {", ".join(supported)}: load a version that is '
        'not quantised'
      )


def write(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Writes named arrays, with dtypes among `DTYPES`, to one file."""
  kinds = {dtype: kind for kind, dtype in DTYPES.items()}
  # The widest come first, so that each begins at a multiple of its width.
  ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
  # transformers loads no file without this.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for name in ordered:
    array = arrays[name]
    if array.dtype not in kinds:
      raise ValueError(
        f'tensor {name} is {array.dtype}, but the dtypes that can be written '
        f'are {", ".join(map(str, kinds))}: convert it'
      )
    header[name] = {
      'dtype': kinds[array.dtype],
      'shape': array.shape,
      'data_offsets': (offset, offset + array.nbytes),
    }
    offset += array.nbytes
  content = json.dumps(header).encode()
  content += b' ' * (-len(content) % 8)
  with path.open('wb') as file:
    file.write(len(content).to_bytes(8, 'little') + content)
    for name in ordered:
      file.write(arrays[name].tobytes())


def _read(path, start, stop):
  buffer = bytearray(stop - start)
  files.read_into(path, start, memoryview(buffer))
  return buffer


def _check_places(header: Mapping[str, Any], num_bytes: int) -> None:
  """Raises ValueError unless each byte belongs to one tensor.

  The format demands it, so that no file means different things to its readers.
  """
  ends = {name: tuple(x['data_offsets']) for name, x in header.items()}
  before, known = 'the header', 0
  for name in sorted(ends, key=lambda name: ends[name]):
    first, last = ends[name]
    if first < known:
      raise ValueError(f'{before} and tensor {name} overlap at byte {first}')
    if first > known:
      raise ValueError(
        f'bytes {known} to {first}, between {before} and tensor {name}, belong '
        'to no tensor'
      )
    before, known = f'tensor {name}', last
  if known < num_bytes:
    raise ValueError(f'bytes {known} to {num_bytes} belong to no tensor')


def _tensor(path, name: str, entry: dict[str, Any], start: int, size: int):
  first, last = entry['data_offsets']
  shape = tuple(entry['shape'])
  tensor = Tensor(path, entry['dtype'], shape, start + first)
  if any(type(number) is not int or number < 0 for number in (first, *shape)):
    raise ValueError(f'tensor {name} has shape {shape} at offset {first}')
  if start + last > size:
    raise ValueError(
      f'tensor {name} ends at byte {start + last} in a file of {size} bytes'
    )
  if tensor.kind in DTYPES:
    expected = math.prod(shape) * DTYPES[tensor.kind].itemsize
    if last - first != expected:
      raise ValueError(
        f'tensor {name} has {last - first} bytes, expected {expected}'
      )
  return tensor
