"""What a run has finished, on disk: killed, it goes on where it was.

One JSON object a line. The first says what is being measured; every further
one is a finished unit, written through to the disk before the next begins.
"""

import fcntl
import json
import os
import pathlib
from typing import Any


class Journal:
  """An append-only file of finished units, each with a key of its own."""

  def __init__(self, path: pathlib.Path, header: dict[str, Any]):
    """Opens or begins the journal at `path`.

    A last line that a kill tore apart is dropped.

    Raises:
      ValueError: the journal there is damaged, in use, or of another run.
    """
    self._path = path
    self._entries: dict[tuple, dict[str, Any]] = {}
    self._file = open(path, 'a+b')  # noqa: SIM115 (closed by `close`)
    self._lock()
    self._file.seek(0)
    lines = self._file.read().split(b'\n')[:-1]
    records = [self._load(i, line) for i, line in enumerate(lines, 1)]
    if records:
      # Compared as it is read back: tuples are lists there.
      self._check_header(records[0], json.loads(json.dumps(header)))
    for record in records[1:]:
      self._entries[tuple(record['key'])] = record['value']
    self._file.truncate(sum(len(line) + 1 for line in lines))
    if not records:
      self._write(header)

  def __contains__(self, key: tuple) -> bool:
    return key in self._entries

  def __getitem__(self, key: tuple) -> dict[str, Any]:
    return self._entries[key]

  def __len__(self) -> int:
    return len(self._entries)

  def add(self, key: tuple, value: dict[str, Any]) -> None:
    """Records a finished unit; returns when it is on the disk."""
    if key in self._entries:
      raise ValueError(f'{key} is in {self._path} already')
    self._write({'key': key, 'value': value})
    self._entries[key] = value

  def close(self) -> None:
    """Lets another run have the file."""
    self._file.close()

  def _write(self, record: dict[str, Any]) -> None:
    self._file.write(json.dumps(record).encode() + b'\n')
    self._file.flush()
    os.fsync(self._file.fileno())

  def _lock(self) -> None:
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'{self._path} is in use by another run: wait for it, or give another '
        '--out'
      ) from error

  def _load(self, number: int, line: bytes) -> dict[str, Any]:
    try:
      return json.loads(line)
    except ValueError as error:
      raise ValueError(
        f'{self._path}, line {number} is damaged: delete the file to measure '
        'anew'
      ) from error

  def _check_header(self, found, expected) -> None:
    different = [
      name
      for name in sorted(found.keys() | expected.keys())
      if found.get(name) != expected.get(name)
    ]
    if different:
      raise ValueError(
        f'{self._path} belongs to a run with another {", ".join(different)}: '
        'give another --out, or delete the file to measure anew'
      )
