"""Columns of tables: fields of records, what they mean, and how to write them.

A dataclass says with `shown` what a table shows of its fields, so that the
terminal and the page of results have the same headings and formats.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from experiments.reporting import tables

NOTHING = '-'  # not measured, or meaningless there
_INTERVAL = '_ci95'
_COLUMN = 'column'


@dataclasses.dataclass(frozen=True)
class Column:
  """A field of a record; its interval, if any, is the field `<name>_ci95`."""

  title: str  # the heading
  meaning: str = ''  # a sentence for readers of the page
  form: str = ''  # a format specification of numbers
  unit: str = ''  # what follows a number, such as 'x'


def shown(
  title: str, meaning: str = '', form: str = '', unit: str = '', **options: Any
) -> Any:
  """Returns a dataclass field with a `Column`; `options` are `field`'s."""
  column = Column(title, meaning, form, unit)
  return dataclasses.field(metadata={_COLUMN: column}, **options)


def of(kind: type) -> dict[str, Column]:
  """Returns the columns of a dataclass by field, in their order."""
  return {
    field.name: field.metadata[_COLUMN]
    for field in dataclasses.fields(kind)
    if _COLUMN in field.metadata
  }


def table(
  records: Sequence[Any],
  names: Sequence[str],
  caption: str = '',
  notes: Sequence[str] = (),
  *,
  with_intervals: bool = True,
) -> tables.Table:
  """Returns the named fields of records that have a value in any of them.

  The records are dataclasses of one kind, whose fields are made by `shown`. A
  note on the page names the columns without values.
  """
  columns = of(type(records[0]))
  is_empty = lambda name: all(getattr(x, name) is None for x in records)
  full = [name for name in names if not is_empty(name)]
  empty = [columns[name].title for name in names if is_empty(name)]
  missing = [f'Not measured: {", ".join(empty)}.'] if empty else []
  return tables.Table(
    [columns[name].title for name in full],
    [
      [_cell(x, name, columns[name], with_intervals) for name in full]
      for x in records
    ],
    caption,
    ' '.join([*notes, *missing]),
    {columns[name].title: columns[name].meaning for name in full},
  )


def _cell(record, name, column, has_interval) -> str:
  value = getattr(record, name)
  if name.endswith(_INTERVAL):
    return interval(value, column.form)
  ci95 = getattr(record, name + _INTERVAL, None) if has_interval else None
  return with_interval(value, ci95, column.form, column.unit)


def with_interval(
  value: Any, ci95: Sequence[float] | None, form: str, unit: str = ''
) -> str:
  """Returns a value as text, with the 95% interval in brackets."""
  shown = text(value, form)
  if shown != NOTHING:
    shown += unit
  if not ci95 or ci95[0] == ci95[1]:
    return shown
  return f'{shown} ({interval(ci95, form)})'


def interval(ci95: Sequence[float] | None, form: str) -> str:
  """Returns 'low-high', '-' if there is no interval or it has no width."""
  if not ci95 or ci95[0] == ci95[1]:
    return NOTHING
  return '-'.join(text(bound, form) for bound in ci95)


def text(value: Any, form: str = '') -> str:
  """Returns any JSON value as short text."""
  match value:
    case None | '' | []:
      shown = NOTHING
    case dict() if not value:  # the pattern {} matches any dict
      shown = NOTHING
    case bool():
      shown = 'yes' if value else 'no'
    case int():
      shown = f'{value:,}'
    case float():
      shown = format(value, form or '.4g')
    case list():
      shown = ' '.join(text(one, form) for one in value)
    case dict():
      shown = ', '.join(f'{name} {text(x, form)}' for name, x in value.items())
    case _:
      shown = str(value)
  return shown
