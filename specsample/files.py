"""Files that are read and folders that are written, whole or not at all."""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file.

  Raises:
    ValueError: there is no file, or it holds no JSON object.
  """
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} cannot be read ({error}): make it again, or download it again'
    ) from error
  if not isinstance(content, dict):
    raise ValueError(f'{path} holds {type(content).__name__}, not an object')
  return content


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes an object as JSON, indented."""
  text = json.dumps(content, indent=2, ensure_ascii=False)
  path.write_text(text + '\n', encoding='utf-8')


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """A folder to fill, which appears at `path` once the block is through.

  When the block raises, nothing stays behind.

  Raises:
    ValueError: `path` exists.
  """
  path = pathlib.Path(path).absolute()
  if path.exists():
    raise ValueError(f'{path} exists: remove it, or name another folder')
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(
    prefix=f'.{path.name}-', dir=path.parent
  ) as scratch:
    # One level down, because a temporary folder is readable by its owner only.
    folder = pathlib.Path(scratch, path.name)
    folder.mkdir()
    yield folder
    os.rename(folder, path)
