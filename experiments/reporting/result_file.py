"""The JSON files that commands write; a schema number says how to read them."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

import gin

from experiments.command import environment
from experiments.reporting import files as reporting_files
from experiments.reporting import rows as rows_lib
from specsample import files

SCHEMA = 5
EVALUATION = 'result.json'
GENERATION = 'generate.json'
COMPILATION = 'compile.json'
_NAMES = (
  *(EVALUATION, GENERATION, COMPILATION),
  *('benchmark.json', 'certificate.json'),
)


def write(path: pathlib.PurePath, content: Mapping[str, Any]) -> None:
  """Writes a file of results, whole or not at all.

  It also says where and how they were measured.
  """
  described = environment.describe() | {
    'gin_config': gin.operative_config_str()
  }
  reporting_files.write_json(path, {'schema': SCHEMA, **described, **content})


def check_settings(path: pathlib.PurePath, parts: Sequence[str]) -> None:
  """Refuses to replace the results of settings other than `parts`.

  A file that is not there or cannot be read may be replaced.
  """
  if not files.at(path).exists():
    return
  try:
    # Results of older schemas, which this version does not read, are not
    # replaced either.
    rows = _load(path)['rows']
    there = list(dict.fromkeys(row.get('part', '') for row in rows))
  except (ValueError, LookupError, TypeError, AttributeError):
    return
  if there and there != list(parts):
    named = ', '.join(map(repr, filter(None, there))) or 'a single setting'
    raise ValueError(
      f'{path} has the results of {named}, not of what is configured here: '
      'give another --out, or move that folder away'
    )


@dataclasses.dataclass(frozen=True)
class Run:
  """One result file, as `read` returns its content."""

  path: pathlib.Path
  folder: str  # relative to the root of the tree
  content: dict[str, Any]

  @property
  def name(self) -> str:
    """The folder and, unless it is an evaluation's, the file."""
    parts = [self.folder] if self.folder != '.' else []
    if self.path.name != EVALUATION or not parts:
      parts.append(self.path.stem)
    return '/'.join(parts)


def find(root: str) -> list[Run]:
  """Reads all result files below a folder, sorted by path."""
  if files.is_remote(root):
    raise ValueError(
      f'--results={root} is in a bucket: copy the folder here first'
    )
  top = pathlib.Path(root)
  if not top.is_dir():
    raise ValueError(
      f'--results={root} is not a folder: give the folder of --out, or one '
      'above it'
    )
  paths = sorted(path for name in _NAMES for path in top.rglob(name))
  if not paths:
    raise ValueError(
      f'--results={root} has neither {EVALUATION} nor another result file: '
      'run experiments.evaluate first'
    )
  folders = [path.parent.relative_to(top).as_posix() for path in paths]
  return list(map(Run, paths, folders, map(read, paths)))


def read(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns a result file's content; rows of a result.json as `rows.Row`."""
  content = _load(path)
  schema = content.get('schema')
  if type(schema) is not int or schema != SCHEMA:
    raise ValueError(
      f'{path} has schema {schema!r}, but this version reads schema {SCHEMA}: '
      'make it again, or move it away'
    )
  if path.name != EVALUATION:
    return content
  try:
    rows = [rows_lib.Row(**record) for record in content.get('rows', ())]
    why = '' if rows_lib.overall(rows) else 'no row over all prompts'
  except TypeError as error:
    why = f'other rows ({error})'
  if why:
    raise ValueError(
      f'{path} has schema {SCHEMA} and {why}, which cannot be reconstructed: '
      'evaluate again into another --out, or move the file away'
    )
  return content | {'rows': rows}


def _load(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns the content of a file of results, of whatever schema."""
  try:
    content = json.loads(files.at(path).read_bytes())
    if not isinstance(content, dict):
      raise ValueError('it holds no JSON object')
  except (OSError, ValueError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise ValueError(
      f'{path} cannot be read ({reason}): move it away, or make it again'
    ) from error
  return content
