"""A journal of what a run has finished, so that it can resume after a kill.

The header says what is being measured. Every further record is a finished unit,
kept before the next one begins: as a line of a local file, or an object in a
bucket.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import errno
import fcntl
import hashlib
import json
import os
import pathlib
from typing import Any
import urllib.parse

from etils import epath

from experiments.command import cli
from experiments.command import distributed
from specsample import files

_NUM_READERS = 32
_HEADER = 'header.json'
_LONGEST_PAIR = 200  # characters of a message


def digest(value: Any) -> str:
  """Returns a digest, for a header, of a value that is too long to be in it."""
  return hashlib.sha256(repr(value).encode()).hexdigest()


def lock(file: Any, path: pathlib.PurePath) -> None:
  """Keeps other runs out of an open file or folder, until it is closed."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    raise ValueError(
      f'{path} is in use by another run: wait for it, or give another --out'
    ) from error


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
  """Returns what two headers have different values of.

  Of configurations and other mappings, the settings that differ are named.
  """
  names = []
  for name, before, now in _different(found, expected):
    if isinstance(before, dict) and isinstance(now, dict) and before and now:
      pairs = []
      for key, was, value in _different(before, now, 'not set'):
        pair = f'{key} = {value} (before: {was})'
        pairs.append(pair if len(pair) <= _LONGEST_PAIR else key)
      name = f'{name} ({"; ".join(pairs)})'
    names.append(name)
  return names


def _different(found, expected, default=None) -> Iterator[tuple[str, Any, Any]]:
  """Yields each key of which two mappings have different values, and these."""
  for name in sorted(found.keys() | expected.keys()):
    before, now = found.get(name, default), expected.get(name, default)
    if before != now:
      yield name, before, now


class Journal(Mapping[tuple, dict[str, Any]]):
  """The finished units of a run, each with its own key.

  Several processes add the same units, and only process 0 stores them.

  Attributes:
    folder: holds it, and what a run keeps beside it.
  """

  def __init__(self, folder: pathlib.PurePath, header: dict[str, Any]):
    """Opens or begins the journal in `folder`, which may be in a bucket.

    The journal is the file journal.jsonl, or in a bucket the folder `journal`.
    A bucket has no locks, so start only one run there at a time. All processes
    have what process 0 finds there.
    """
    self.folder = folder
    self._store: _Lines | _Objects | None = None
    records: list[dict[str, Any]] = []
    if distributed.is_first():
      if files.is_remote(folder):
        self._store = _Objects(files.at(folder) / 'journal')
      else:
        self._store = _Lines(folder / 'journal.jsonl')
      records = _resumed(self._store, header)
    self._entries: dict[tuple, dict[str, Any]] = {
      tuple(record['key']): record['value']
      for record in distributed.from_first(records)
    }

  def __getitem__(self, key: tuple) -> dict[str, Any]:
    return self._entries[key]

  def of(self, *prefix: str | int) -> list[dict[str, Any]]:
    """Returns the units whose keys begin with `prefix`, sorted by the rest."""
    size = len(prefix)
    keys = sorted(key for key in self._entries if key[:size] == prefix)
    return [self._entries[key] for key in keys]

  def __len__(self) -> int:
    return len(self._entries)

  def __iter__(self) -> Iterator[tuple]:
    """Returns the keys, in the order in which their units were finished."""
    return iter(self._entries)

  def add(self, key: tuple, value: dict[str, Any]) -> None:
    """Records a finished unit; returns once it is stored."""
    if key in self._entries:
      raise ValueError(f'{key} is already in {self._store}')
    if self._store is not None:
      self._store.add({'key': key, 'value': value})
    self._entries[key] = value

  def close(self) -> None:
    """Closes the journal, so that another run can open it."""
    if self._store is not None:
      self._store.close()

  def remove(self) -> None:
    """Deletes the journal, once the results have what it kept."""
    if self._store is not None:
      self._store.remove()


def _resumed(store, header) -> list[dict[str, Any]]:
  """Returns the units of a run that is resumed; otherwise begins one."""
  records = store.read()
  if not records:
    store.add(header)
    return []
  # The header is compared as it is read back: JSON makes lists of tuples.
  if different := _differences(records[0], json.loads(json.dumps(header))):
    raise ValueError(
      f'{store} belongs to a run that differs in {", ".join(different)}: give '
      'another --out, or delete the file to measure anew'
    )
  return records[1:]


# Both kinds of store read the header, then the records, or nothing at first. A
# record is the header if it has no key.


class _Lines:
  """One JSON object per line, written through to the disk."""

  def __init__(self, path: pathlib.PurePath):
    self._path = path
    # Unbuffered: a buffer would be written once more when the process ends.
    try:
      self._file = open(path, 'a+b', buffering=0)  # noqa: SIM115 (see `close`)
    except OSError as error:
      raise ValueError(
        f'{path}: {error.strerror}: give an --out that can be written'
      ) from error
    lock(self._file, path)

  def __str__(self) -> str:
    return str(self._path)

  def read(self) -> list[dict[str, Any]]:
    # A kill may have left the last line incomplete.
    self._file.seek(0)
    lines = self._file.read().split(b'\n')[:-1]
    records = [
      _load(f'{self._path}, line {i}', line) for i, line in enumerate(lines, 1)
    ]
    self._file.truncate(sum(len(line) + 1 for line in lines))
    return records

  def add(self, record: dict[str, Any]) -> None:
    line = json.dumps(record).encode() + b'\n'
    try:
      if self._file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
      os.fsync(self._file.fileno())
    except OSError as error:
      raise cli.NotWrittenError(
        f'{self._path} cannot be written ({error.strerror or error}): make '
        'room, then run the same command again to continue'
      ) from error

  def close(self) -> None:
    self._file.close()

  def remove(self) -> None:
    pathlib.Path(self._path).unlink()
    self.close()


class _Objects:
  """A JSON object per record; each appears in the bucket when complete."""

  def __init__(self, folder: epath.Path):
    self._folder = folder

  def __str__(self) -> str:
    return str(self._folder)

  def read(self) -> list[dict[str, Any]]:
    names = set()
    if files.is_folder(self._folder):
      every = (path.name for path in self._folder.iterdir())
      names = {name for name in every if name.endswith('.json')}
    if names and _HEADER not in names:
      raise ValueError(
        f'{self._folder} has no {_HEADER}: give another --out, or delete the '
        'folder to measure anew'
      )
    ordered = sorted(names, key=lambda name: (name != _HEADER, name))
    # Each read takes as long as a round trip to the bucket.
    with futures.ThreadPoolExecutor(_NUM_READERS) as pool:
      return list(pool.map(self._read, ordered))

  def _read(self, name: str) -> dict[str, Any]:
    path = self._folder / name
    return _load(str(path), path.read_bytes())

  def add(self, record: dict[str, Any]) -> None:
    name = _HEADER
    if 'key' in record:
      parts = [urllib.parse.quote(str(part), safe='') for part in record['key']]
      name = ','.join(parts) + '.json'
    self._folder.mkdir(parents=True, exist_ok=True)
    (self._folder / name).write_bytes(json.dumps(record).encode())

  def close(self) -> None:
    pass

  def remove(self) -> None:
    self._folder.rmtree()


def _load(where: str, text: bytes) -> dict[str, Any]:
  try:
    return json.loads(text)
  except ValueError as error:
    raise ValueError(
      f'{where} is damaged: delete the file to measure anew'
    ) from error
