"""The JSON files that commands write; a schema number says how to read them."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

import gin

from experiments.command import environment
from experiments.reporting import files as reporting_files
from specsample import files

SCHEMA = 5


def write(path: pathlib.PurePath, content: Mapping[str, Any]) -> None:
  """Writes a file of results, whole or not at all.

  It also says where and how they were measured.
  """
  described = environment.describe() | {
    'gin_config': gin.operative_config_str()
  }
  reporting_files.write_json(path, {'schema': SCHEMA, **described, **content})


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
    rows = load(path)['rows']
    there = list(dict.fromkeys(row.get('part', '') for row in rows))
  except (ValueError, LookupError, TypeError, AttributeError):
    return
  if there and there != list(parts):
    named = ', '.join(map(repr, filter(None, there))) or 'a single setting'
    raise ValueError(
      f'{path} has the results of {named}, not of what is configured here: '
      'give another --out, or move that folder away'
    )


def load(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns the content of a file of results, of whatever schema.

  Raises:
    ValueError: it cannot be read; the message names it and the remedy.
  """
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
