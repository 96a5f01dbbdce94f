"""Tables of records, which commands print and the page of results has too.

A dataclass says with `shown` what a table shows of its fields, so that the
terminal and the page have the same headings and formats.

Names come from users. Whatever rich would take for markup or an emoji in them
is text like any other; styles come as a `rich.text.Text`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import sys
from typing import Any

import rich.box
import rich.console
import rich.measure
import rich.table

NOTHING = '-'  # not measured, or meaningless there
_INTERVAL = '_ci95'
_COLUMN = 'column'
# For a table in a file or a pipe, where no terminal says how wide it is.
_PIPE_WIDTH = 100
# The first column's share of a terminal that is too narrow for the whole table.
_SHARE_OF_NAMES = 1 / 3
_ANY_WIDTH = 1 << 16


def console() -> rich.console.Console:
  """Returns a console on standard output; plain text if it is no terminal."""
  width = None if sys.stdout.isatty() else _PIPE_WIDTH
  return rich.console.Console(
    width=width, highlight=False, markup=False, emoji=False
  )


@dataclasses.dataclass(frozen=True)
class Table:
  """Lines of text under headings; all but the first column align right.

  A table that is wider than the terminal is printed in parts, one below the
  other, each with the first column and as many others as fit: nothing is cut.
  """

  headings: Sequence[str]
  rows: Sequence[Sequence[str]]  # a cell per heading; the first names the row
  caption: str = ''  # above the table on the page
  note: str = ''  # below it
  # What columns mean, by heading, for the page.
  meanings: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> Iterator[rich.table.Table]:
    """Yields the parts of the table, for rich."""
    room = options.max_width
    everything = range(1, len(self.headings))
    unlimited = options.update(width=_ANY_WIDTH)

    def fits(columns, limit):
      part = self._part(columns, limit)
      needed = rich.measure.Measurement.get(console, unlimited, part)
      return needed.maximum <= room

    if fits(everything, None):
      yield self._part(everything, None)
      return
    limit = int(_SHARE_OF_NAMES * room)
    shown: list[int] = []
    for column in everything:
      if shown and not fits([*shown, column], limit):
        yield self._part(shown, limit)
        shown = []
      shown.append(column)
    yield self._part(shown, limit)

  def _part(self, columns: Sequence[int], limit: int | None):
    """Returns the first column, at most `limit` wide, beside other columns."""
    table = rich.table.Table(
      box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False
    )
    # A cell that is too wide by itself continues on the next line.
    first, *others = map(_in_two_lines, self.headings)
    table.add_column(first, overflow='fold', max_width=limit)
    for i in columns:
      table.add_column(
        others[i - 1], justify='right', vertical='bottom', overflow='fold'
      )
    for row in self.rows:
      table.add_row(row[0], *(row[i] for i in columns))
    return table


def _in_two_lines(heading: str) -> str:
  """Breaks a heading where its longer line becomes shortest."""
  words = heading.split()
  broken = [
    '\n'.join(filter(None, map(' '.join, (words[:i], words[i:]))))
    for i in range(len(words))
  ]
  longest = lambda text: max(map(len, text.split('\n')))
  return min(broken, key=longest, default='')


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


def columns(kind: type) -> dict[str, Column]:
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
) -> Table:
  """Returns the named fields of records that have a value in any of them.

  The records are dataclasses of one kind, whose fields are made by `shown`. A
  note on the page names the columns without values.
  """
  known = columns(type(records[0]))
  is_empty = lambda name: all(getattr(x, name) is None for x in records)
  full = [name for name in names if not is_empty(name)]
  empty = [known[name].title for name in names if is_empty(name)]
  missing = [f'Not measured: {", ".join(empty)}.'] if empty else []
  return Table(
    [known[name].title for name in full],
    [
      [_cell(x, name, known[name], with_intervals) for name in full]
      for x in records
    ],
    caption,
    ' '.join([*notes, *missing]),
    {known[name].title: known[name].meaning for name in full},
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
