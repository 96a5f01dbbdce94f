"""Files here and in a bucket, read in parts; folders written whole or not.

A path is a local one or begins with gs://. With several processes the first one
alone makes, renames and removes.
"""

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import secrets
import shutil
from typing import Any

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

# What is asked of a bucket in one request, and how many at a time.
_PART_BYTES = 4 * 2**20
_NUM_PARTS = 32


def at(path: str | os.PathLike[str]) -> epath.Path:
  """The path of a file or folder, local or of a bucket.

  Raises:
    ValueError: it is remote and not of gs://, or package gcsfs is missing.
  """
  name = os.fspath(path)
  scheme, separator, _ = name.partition('://')
  if separator and scheme != 'gs':
    raise ValueError(
      f'{name}: of remote paths those of gs:// are supported: copy it to such '
      'a bucket, or to a local folder'
    )
  if separator:
    # Imported where it is used: it takes as long as half of the library.
    import fsspec  # noqa: PLC0415

    try:
      fsspec.get_filesystem_class(scheme)
    except ImportError as error:
      raise ValueError(
        f'{name}: a gs:// path needs package gcsfs: run `pip install '
        "'specsample[gcs]'`"
      ) from error
  return epath.Path(name)


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """`at`, from the root of the file system or bucket."""
  path = at(path)
  return path if is_remote(path) else epath.Path(os.path.abspath(path))


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is of a bucket."""
  return os.fspath(path).startswith('gs://')


def is_folder(path: epath.Path) -> bool:
  """Whether there is a folder.

  Raises:
    ValueError: a bucket that cannot be reached.
  """
  try:
    return path.is_dir()
  except Exception as error:  # Those of a bucket have nothing in common.
    raise ValueError(
      f'{path} cannot be reached ({_one_line(error)}): check the name of the '
      'bucket, the network, and the credentials (`gcloud auth '
      'application-default login`)'
    ) from error


def size(path: epath.Path) -> int:
  """The number of bytes in a file."""
  if is_remote(path):
    system, name = _system(path)
    return system.size(name)
  return os.path.getsize(path)


def read_into(path: epath.Path, offset: int, buffer: memoryview) -> None:
  """Fills `buffer` with the bytes of a file from `offset` on.

  No others are asked for, and of a bucket many parts at a time.

  Raises:
    ValueError: the file ends before.
  """
  if is_remote(path):
    num_bytes = 0
    for start in range(0, len(buffer), _PART_BYTES * _NUM_PARTS):
      stop = min(start + _PART_BYTES * _NUM_PARTS, len(buffer))
      for part in _parts(path, offset + start, offset + stop):
        buffer[num_bytes : num_bytes + len(part)] = part
        num_bytes += len(part)
  else:
    with path.open('rb') as file:
      file.seek(offset)
      num_bytes = file.readinto(buffer)
  if num_bytes < len(buffer):
    raise ValueError(
      f'{path} ends at byte {offset + num_bytes} of {offset + len(buffer)}'
    )


def _parts(path: epath.Path, start: int, stop: int) -> list[bytes]:
  system, name = _system(path)
  starts = list(range(start, stop, _PART_BYTES))
  stops = [min(i + _PART_BYTES, stop) for i in starts]
  return system.cat_ranges(
    [name] * len(starts), starts, stops, on_error='raise'
  )


def _system(path):
  import fsspec  # noqa: PLC0415

  return fsspec.core.url_to_fs(os.fspath(path))


def read_json(path: epath.Path) -> dict[str, Any]:
  """The object in a JSON file.

  Raises:
    ValueError: there is no file, or it holds no JSON object.
  """
  try:
    content = json.loads(path.read_bytes().decode('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be read ({error}): make it again, or download it again'
    ) from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} holds {type(content).__name__}, not an object')
  return content


def write_json(path: epath.Path, content: dict[str, Any]) -> None:
  """Writes an object as JSON, indented."""
  text = json.dumps(content, indent=2, ensure_ascii=False)
  path.write_bytes(f'{text}\n'.encode())


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[epath.Path]:
  """A folder to fill, which appears at `path` once the block is through.

  When the block raises, nothing stays behind. Several processes all enter the
  block, with the same path on a file system that they share.

  In a bucket, where nothing can be renamed, it is `path` from the beginning:
  there the block writes last what marks the folder as whole.

  Raises:
    ValueError: `path` exists.
  """
  final = absolute(path)
  if is_remote(final):
    on_first_process(lambda: _check_absent(final))
    yield final
    return
  scratch_of = lambda number: final.with_name(f'.{final.name}-{number:08x}')

  def make():
    _check_absent(final)
    number = secrets.randbits(31)
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch_of(number).mkdir()
    return number

  scratch = scratch_of(on_first_process(make))
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
  """Runs `action` in process 0, once all have come here; all wait for it.

  Returns:
    The action's result in every process, 0 for None; at least 0, 32 bits.

  Raises:
    ValueError: in the others, when the action raised in process 0.
  """
  multihost_utils.sync_global_devices('on_first_process')
  result, caught = 0, None
  if jax.process_index() == 0:
    try:
      result = action() or 0
    except Exception as error:  # The others learn of it before it is raised.
      result, caught = -1, error
  result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
  if caught is not None:
    raise caught
  if result < 0:
    raise ValueError('process 0 failed: its own message says why')
  return result


def _one_line(error):
  return ' '.join(str(error).split()) or type(error).__name__
