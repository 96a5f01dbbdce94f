"""Local files and files in a bucket, read in parts; all-or-nothing folders.

A path is local or begins with gs://. With several processes, only the first one
creates, renames and removes.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import math
import os
import secrets
import shutil
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

# The size of one request to a bucket, and the number of requests at a time.
_PART_BYTES = 4 * 2**20
_NUM_PARTS = 32


def name_of(path: str | os.PathLike[str]) -> str:
  """Returns a path as text; raises ValueError if it is not one, or bytes."""
  if isinstance(path, str | os.PathLike) and not isinstance(path, type):
    name = os.fspath(path)
    if isinstance(name, str):
      return name
  raise ValueError(
    f'path is {path!r}: give the text of a path, or a pathlib.Path'
  )


def at(path: str | os.PathLike[str]) -> epath.Path:
  """Returns the path of a file or folder, local or in a bucket."""
  name = name_of(path)
  scheme, separator, _ = name.partition('://')
  if separator and scheme != 'gs':
    raise ValueError(
      f'{name} is a remote path, and only gs:// is supported: copy it to a '
      'gs:// bucket, or to a local folder'
    )
  if separator:
    # Imported lazily: it takes half as long to import as the whole library.
    import fsspec  # noqa: PLC0415

    try:
      fsspec.get_filesystem_class(scheme)
    except ImportError as error:
      raise ValueError(
        f'{name} is a gs:// path, which needs the package gcsfs: run `pip '
        "install 'specsample[gcs]'`"
      ) from error
  return epath.Path(name)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """Returns `at(path)` as an absolute path."""
  path = at(path)
  return path if is_remote(path) else epath.Path(os.path.abspath(path))


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is in a bucket."""
  return os.fspath(path).startswith('gs://')


def is_folder(path: epath.Path) -> bool:
  """Returns whether a path is an existing folder."""
  try:
    return path.is_dir()
  except Exception as error:  # Errors of a bucket have no common base class.
    reason = ' '.join(str(error).split()) or type(error).__name__
    raise ValueError(
      f'{path} cannot be reached ({reason}): check the name of the '
      'bucket, the network, and the credentials (`gcloud auth '
      'application-default login`)'
    ) from error


def size(path: epath.Path) -> int:
  """Returns the number of bytes in a file."""
  if is_remote(path):
    system, name = _system(path)
    return system.size(name)
  return os.path.getsize(path)


def read_into(path: epath.Path, offset: int, buffer: memoryview) -> None:
  """Fills `buffer` with the bytes of a file from `offset` on.

  No other bytes are requested; a bucket is read in many parts at a time.
  """
  stop, num_bytes = offset + len(buffer), 0
  if is_remote(path):
    system, name = _system(path)
    for first in range(offset, stop, _PART_BYTES * _NUM_PARTS):
      end = min(first + _PART_BYTES * _NUM_PARTS, stop)
      starts = list(range(first, end, _PART_BYTES))
      stops = [min(start + _PART_BYTES, end) for start in starts]
      names = [name] * len(starts)
      for part in system.cat_ranges(names, starts, stops, on_error='raise'):
        buffer[num_bytes : num_bytes + len(part)] = part
        num_bytes += len(part)
  else:
    with path.open('rb') as file:
      file.seek(offset)
      num_bytes = file.readinto(buffer)
  if num_bytes < len(buffer):
    raise ValueError(
      f'{path} ends at byte {offset + num_bytes} of {stop}: download it again'
    )


def _system(path):
  import fsspec  # noqa: PLC0415

  return fsspec.core.url_to_fs(os.fspath(path))


def read_json(path: epath.Path) -> dict[str, Any]:
  """Returns the object in a JSON file."""
  try:
    content = json.loads(path.read_bytes().decode('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be read ({error}): make it again, or download it again'
    ) from error
  if not isinstance(content, dict):
    raise ValueError(
      f'{path} holds a JSON {type(content).__name__}, not an object: make it '
      'again, or download it again'
    )
  return content


def refuse_pointer(path: epath.Path) -> None:
  """Raises ValueError if Git left a pointer in the place of a large file."""
  wanted = b'version https://git-lfs'
  num_bytes = size(path)
  if num_bytes >= 1024:  # more than the format allows a pointer
    return
  found = bytearray(min(len(wanted), num_bytes))
  read_into(path, 0, memoryview(found))
  if found == wanted:
    raise ValueError(
      f'{path} is a pointer of Git LFS, not the file: run `git lfs pull` '
      'in its folder, or download the file'
    )


def write_json(path: epath.Path, content: dict[str, Any]) -> None:
  """Writes an object as indented JSON."""
  text = json.dumps(content, indent=2, ensure_ascii=False)
  path.write_bytes(f'{text}\n'.encode())


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[epath.Path]:
  """Yields a folder to fill, which appears at `path` once the block is done.

  If the block raises, nothing is left behind. With several processes, all of
  them enter the block, with the same path on a shared file system.

  Nothing can be renamed in a bucket, so there the folder is at `path` from the
  start, and stays there if the block raises. The block must write last the file
  that marks the folder as complete.
  """
  final = absolute(path)
  if is_remote(final):
    on_first_process(lambda: _check_absent(final))
    yield final
    return

  def make():
    _check_absent(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    return secrets.randbits(31)

  number = on_first_process(make)
  scratch = final.with_name(f'.{final.name}-{number:08x}')
  on_first_process(scratch.mkdir)
  try:
    yield scratch
    on_first_process(lambda: os.rename(scratch, final))
  finally:
    if jax.process_index() == 0:
      shutil.rmtree(scratch, ignore_errors=True)


def _check_absent(path):
  if is_folder(path) or path.exists():
    raise ValueError(f'{path} exists: remove it, or name another folder')


def on_first_process(action: Callable[[], int | None]) -> int:
  """Runs `action` in process 0 once all processes arrive; all wait for it.

  Returns its result, an int32 of at least 0, or 0 for None, in every process.
  """
  multihost_utils.sync_global_devices('on_first_process')
  result, caught = 0, None
  if jax.process_index() == 0:
    try:
      result = action() or 0
    except Exception as error:  # Raised once the other processes know.
      result, caught = -1, error
  result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
  if caught is not None:
    raise caught
  if result < 0:
    raise ValueError('process 0 failed: its own message says why')
  return result


def array_bytes(tree: Any) -> int:
  """Returns the bytes of all arrays of a tree; a mesh's copies count once.

  Shapes with dtypes may stand for arrays, also in `bytes_per_device`.
  """
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes that one device holds, given leaves with a sharding."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
