"""The JSON files that commands write; a schema number says how to read them.

A result.json may have `paper` beside its
rows: what a paper reports, and our numbers.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import types
import typing
from typing import Any

from experiments.reporting import files as reporting_files
from experiments.reporting import rows as rows_lib
from specsample import files

SCHEMA = 5
# The types of a row's fields.
_HINTS = typing.get_type_hints(rows_lib.Row)
# The fields of a paper, and of its rows; see `evaluation.papers`.
_PAPER = {'source', 'note', 'targets', 'rows'}
_PAPER_ROW = {'row', 'quantity', 'paper', 'ours', 'ci95'}
# The fields of every result file that say where it was measured.
_DESCRIPTION = ('hardware', 'versions', 'git_commit', 'command')


def write(path: pathlib.PurePath, content: Mapping[str, Any]) -> None:
  """Writes a file of results, whole or not at all."""
  reporting_files.write_json(path, {'schema': SCHEMA, **content})


def read(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns a result file's content.

  The rows of a result.json have the fields of `rows.Row`. In other files, only
  the schema is checked.

  Raises:
    ValueError: if the file is missing, damaged, or of a schema that this
      version does not read; it names the file, the schema and the remedy.
  """
  content = _content(path)
  schema = content.get('schema')
  if type(schema) is not int or schema != SCHEMA:
    raise ValueError(
      f'{path} has schema {schema!r}, but this version reads schema {SCHEMA}: '
      'make it again, or move it away'
    )
  if path.name == 'result.json':
    _check_result(path, content)
  return content


def check_settings(path: pathlib.PurePath, parts: Sequence[str]) -> None:
  """Refuses to replace the results of other settings.

  Args:
    path: a result.json, which need not exist. A file that cannot be read may be
      replaced.
    parts: the names of the settings that are to be written there.

  Raises:
    ValueError: if results of others are there; it names them and the remedy.
  """
  if not files.at(path).exists():
    return
  try:
    # Results of older schemas, which this version does not read, are not
    # replaced either.
    rows = _content(path)['rows']
    there = list(dict.fromkeys(row.get('part', '') for row in rows))
  except (ValueError, LookupError, TypeError, AttributeError):
    return
  if there and there != list(parts):
    named = ', '.join(map(repr, filter(None, there))) or 'a single setting'
    raise ValueError(
      f'{path} has the results of {named}, not of what is configured here: '
      'give another --out, or move that folder away'
    )


def _content(path):
  try:
    content = json.loads(files.at(path).read_bytes())
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror or error}): make it readable, '
      'or give another --out'
    ) from error
  except ValueError as error:
    raise ValueError(
      f'{path} is not a JSON file: move it away, or make it again'
    ) from error
  if not isinstance(content, dict):
    raise ValueError(
      f'{path} does not hold a JSON object, as result files do: move it away, '
      'or make it again'
    )
  return content


def _check_result(path, content):
  _check(path, content, _DESCRIPTION)
  rows = content.get('rows')
  if not isinstance(rows, list) or not rows:
    raise _refusal(path, 'no rows')
  if not all(isinstance(row, dict) for row in rows):
    raise _refusal(path, 'rows that are not objects')
  for row in rows:
    _check(path, row, _HINTS)
    if unknown := sorted(row.keys() - _HINTS.keys()):
      raise _refusal(path, f'unknown fields {", ".join(unknown)}')
    _check_types(path, row)
  known = [rows_lib.Row(**row) for row in rows]
  in_all = {row.setting for row in rows_lib.overall(known)}
  if {row.setting for row in known} - in_all:
    raise _refusal(path, 'no row over all prompts')
  _check_paper(path, content.get('paper'))


def _check_types(path, row):
  """Checks the types of a row's fields, but not of the items of a list."""
  for name, hint in _HINTS.items():
    union = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    kinds = [typing.get_origin(one) or one for one in union or (hint,)]
    # In JSON, a float may be written as a whole number.
    kinds += [int] * (float in kinds)
    if not isinstance(row[name], tuple(kinds)):
      raise _refusal(path, f'a {name} that is {row[name]!r}')


def _check_paper(path, paper):
  if paper is None:
    return
  is_whole = isinstance(paper, dict) and paper.keys() >= _PAPER
  rows = paper['rows'] if is_whole else None
  if not isinstance(rows, list) or not all(
    isinstance(row, dict) and row.keys() >= _PAPER_ROW for row in rows
  ):
    raise _refusal(path, "a paper's numbers in another form")


def _check(path, found, names):
  missing = [name for name in names if name not in found]
  if missing:
    raise _refusal(path, f'no {", ".join(missing)}')


def _refusal(path, why):
  return ValueError(
    f'{path} has schema {SCHEMA} and {why}, which cannot be reconstructed: '
    'evaluate again into another --out, or move the file away'
  )
