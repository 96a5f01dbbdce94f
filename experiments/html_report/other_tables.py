"""Tables of a page for the results of commands other than evaluate."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.reporting import columns
from experiments.reporting import tables as tables_lib

# Shown separately, as facts about the run.
DESCRIPTION = (
  *('schema', 'hardware', 'versions', 'compiler_flags', 'git_commit'),
  *('command', 'gin_config', 'environment'),
)
# A certificate has thousands of rows; the file has the rest.
_MOST_ROWS = 30


def description(content: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the entries that say where the results were measured."""
  return content.get('environment') or content


def tables(content: Mapping[str, Any], file: str) -> Iterator[tables_lib.Table]:
  """Yields a table of the single values, then one per list of records."""
  values: dict[str, Any] = {}
  nested = {}
  for name, value in content.items():
    if name in DESCRIPTION:
      continue
    records = _records(value)
    if records is None:
      values[name] = value
    elif records:
      nested[name] = records
  if values:
    rows = [[_words(name), _text(value)] for name, value in values.items()]
    yield tables_lib.Table(['name', 'value'], rows, 'Values')
  for name, records in nested.items():
    yield _table(_words(name), records, file)


def _records(value) -> list[dict[str, Any]] | None:
  """Returns records as a list, also records by name; None for other values."""
  records = value
  if isinstance(value, dict):
    if not value or not all(isinstance(one, dict) for one in value.values()):
      return None
    records = [{'': name, **record} for name, record in value.items()]
  is_table = isinstance(records, list) and all(
    isinstance(one, dict) for one in records
  )
  return records if is_table else None


def _table(caption, records, file):
  names = list(dict.fromkeys(name for record in records for name in record))
  shown = records[:_MOST_ROWS]
  left = len(records) - len(shown)
  return tables_lib.Table(
    [_words(name) for name in names],
    [[_text(record.get(name)) for name in names] for record in shown],
    caption,
    f'{left:,} more rows are in {file}.' if left else '',
  )


def _text(value) -> str:
  return columns.text(value)


def _words(name: str) -> str:
  return name.replace('_', ' ')
