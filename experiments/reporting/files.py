"""Files that are written whole or not at all, also in a bucket."""

from collections.abc import Sequence
import csv
import dataclasses
import io
import json
import os
import pathlib
from typing import Any

from experiments.command import cli
from specsample import files


def write_json(path: pathlib.PurePath, value: Any) -> None:
  """Writes a JSON file, whole or not at all."""
  text = json.dumps(value, indent=2, allow_nan=False)
  write(path, (text + '\n').encode())


def write_csv(path: pathlib.PurePath, rows: Sequence[Any]) -> None:
  """Writes rows, which are dataclasses of one kind; there is at least one.

  A cell that is not text is written as JSON, and None as an empty cell.
  """
  names = [field.name for field in dataclasses.fields(rows[0])]
  text = io.StringIO()
  writer = csv.DictWriter(text, names, lineterminator='\n')
  writer.writeheader()
  for row in rows:
    cells = dataclasses.asdict(row).items()
    writer.writerow({name: _cell(value) for name, value in cells})
  write(path, text.getvalue().encode())


def _cell(value: Any) -> str:
  if value is None:
    return ''
  return value if isinstance(value, str) else json.dumps(value)


def write(path: pathlib.PurePath, data: bytes) -> None:
  """Writes a file that appears under its name only when it is complete.

  `path` is a `pathlib.Path`, or an `epath.Path`, which may be in a bucket.
  """
  if files.is_remote(path):
    # In a bucket, an object appears once all of it has arrived.
    files.at(path).write_bytes(data)
    return
  # Another process may be writing the same file.
  partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
  try:
    with open(partial, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  except OSError as error:
    # On a full disk, the partial file would hold the last free bytes.
    pathlib.Path(partial).unlink(missing_ok=True)
    raise cli.NotWrittenError(
      f'{path} cannot be written ({error.strerror or error}): make room, '
      'then run the same command again to continue'
    ) from error
