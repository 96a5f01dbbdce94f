"""Plain text and tables, with which commands print their results.

A table is a value: a terminal prints it, and the page of results has it too.

Names come from users. Whatever rich would take for markup or an emoji in them
is text like any other; styles come as a `rich.text.Text`.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import sys

import rich.box
import rich.console
import rich.measure
import rich.table

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
