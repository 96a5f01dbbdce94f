"""The JSON files that commands write; a schema number says how to read them.

A file without a number has schema 1. Since schema 2 a file has `schema`, and
result.json may have `paper` beside its rows: what a paper reports, and our
numbers. _GAINED lists the fields that rows have gained since, _REDEFINED those
whose meaning has changed.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import types
import typing
from typing import Any

from experiments.reporting import columns
from experiments.reporting import files as reporting_files
from experiments.reporting import rows as rows_lib
from specsample import files

SCHEMA = 5

# The fields that rows of result.json have had from the beginning.
_FIRST = (
  *('method', 'drafter', 'verifier', 'law', 'lossless', 'benchmark'),
  *('category', 'num_draft_tokens', 'temperature', 'batch_size', 'prompts'),
  *('tokens', 'rounds', 'tokens_per_round', 'acceptance_by_position'),
  *('ms_per_token', 'speedup', 'speedup_ci95', 'draft_ms', 'verify_ms'),
  *('overhead_ms', 'percent_of_roofline'),
)
# The fields that rows gained with a schema, and their values in earlier files:
# mostly None, for what was not measured.
_GAINED: dict[int, dict[str, Any]] = {
  2: {
    'part': '',
    'samples': 1,
    'tokens_per_round_ci95': None,
    'acceptance': None,
    'acceptance_ci95': None,
    'ms_per_token_ci95': None,
    'mean_speedup': None,
    'mean_speedup_ci95': None,
    'leviathan_speedup': None,
    'predicted_speedup': None,
    'prefill_ms': None,
    'cost_ratio': None,
    'scores': {},
  },
  3: {'outputs_tied': None, 'outputs_differing': None},
  5: {'plain_rounds': None, 'verify_ms_by_width': None},
}

# Up to schema 3, the roofline was that of a copy alone, and the passes by which
# cost ratios are divided had no unembedding.
_REDEFINED: dict[int, tuple[str, ...]] = {
  4: ('cost_ratio', 'leviathan_speedup', 'percent_of_roofline'),
}
# Nor had the pass of rows that draft nothing: it was in the rest of the round.
_REDEFINED_WITHOUT_DRAFTS: dict[int, tuple[str, ...]] = {
  4: ('verify_ms', 'overhead_ms'),
}

# The types of a row's fields.
_HINTS = typing.get_type_hints(rows_lib.Row)
# The same for fields beside the rows.
_GAINED_BESIDE: dict[int, dict[str, Any]] = {2: {'paper': None}}
# The fields of every result file that say where it was measured.
_DESCRIPTION = ('hardware', 'versions', 'git_commit', 'command')


def write(path: pathlib.PurePath, content: Mapping[str, Any]) -> None:
  """Writes a file of results, whole or not at all."""
  reporting_files.write_json(path, {'schema': SCHEMA, **content})


def read(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns a result file's content as this version would have written it.

  Fields that an earlier version did not write have the values that are known
  for it, else None. Only result.json has changed so far; in other files, only
  the number is checked.

  Raises:
    ValueError: if the file is missing, damaged, or of a schema that cannot be
      read as today's; it names the file, the schema and the remedy.
  """
  try:
    content = json.loads(files.at(path).read_bytes())
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read ({error.strerror or error})'
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
  schema = content.get('schema', 1)
  if type(schema) is not int or schema < 1:
    raise ValueError(
      f'{path} has schema {schema!r}, which never existed: make it again'
    )
  if schema > SCHEMA:
    raise ValueError(
      f'{path} has schema {schema}, but this version reads only up to '
      f'{SCHEMA}: update specsample'
    )
  if path.name == 'result.json':
    content = _migrate(path, content, schema)
  return content | {'schema': SCHEMA}


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
    rows = read(path)['rows']
  except ValueError:
    return
  there = list(dict.fromkeys(row.get('part', '') for row in rows))
  if there != list(parts):
    named = ', '.join(map(repr, filter(None, there))) or 'a single setting'
    raise ValueError(
      f'{path} has the results of {named}, not of what is configured here: '
      'give another --out, or move that folder away'
    )


def _migrate(path, content, schema):
  """Adds the fields of later schemas, and checks those of this schema.

  Unknown fields are kept.
  """
  content = _since(schema, _GAINED_BESIDE) | content
  _check(path, schema, content, _DESCRIPTION)
  rows = content.get('rows')
  if not isinstance(rows, list) or not rows:
    raise _refusal(path, schema, 'no rows')
  if not all(isinstance(row, dict) for row in rows):
    raise _refusal(path, schema, 'rows that are not objects')
  rows = [_since(schema, _GAINED) | row for row in rows]
  for row in rows:
    _check(path, schema, row, _FIRST)
    _check_types(path, schema, row)
  rows = [row | dict.fromkeys(_unknown(schema, row)) for row in rows]
  setting = lambda row: tuple(row.get(name) for name in columns.SETTING)
  in_all = {setting(row) for row in rows if row['category'] == rows_lib.OVERALL}
  if {setting(row) for row in rows} - in_all:
    raise _refusal(path, schema, 'no row over all prompts')
  _check_paper(path, schema, content.get('paper'))
  return content | {'rows': rows}


def _check_types(path, schema, row):
  """Checks the types of a row's fields, but not of the items of a list."""
  for name, hint in _HINTS.items():
    union = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    kinds = [typing.get_origin(one) or one for one in union or (hint,)]
    # In JSON, a float may be written as a whole number.
    kinds += [int] * (float in kinds)
    if name in row and not isinstance(row[name], tuple(kinds)):
      raise _refusal(path, schema, f'a {name} that is {row[name]!r}')


def _check_paper(path, schema, paper):
  if paper is None:
    return
  rows = paper.get('rows') if isinstance(paper, dict) else None
  if not isinstance(rows, list) or not all(
    isinstance(row, dict) and {'row', 'quantity'} <= row.keys() for row in rows
  ):
    raise _refusal(path, schema, "a paper's numbers in another form")


def _unknown(schema, row):
  """Returns the fields that an earlier version measured as something else."""
  redefined = [_REDEFINED]
  if not row['num_draft_tokens']:
    redefined.append(_REDEFINED_WITHOUT_DRAFTS)
  return [
    name
    for fields in redefined
    for at, names in fields.items()
    if at > schema
    for name in names
  ]


def _since(schema, gained):
  return {
    name: value
    for at, fields in gained.items()
    if at > schema
    for name, value in fields.items()
  }


def _check(path, schema, found, names):
  missing = [name for name in names if name not in found]
  if missing:
    raise _refusal(path, schema, f'no {", ".join(missing)}')


def _refusal(path, schema, why):
  return ValueError(
    f'{path} has schema {schema} and {why}, which cannot be reconstructed: '
    'evaluate again into another --out, or move the file away'
  )
