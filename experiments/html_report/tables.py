"""The tables of a page: an evaluation's, and its comparison with a paper."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
from typing import Any

from experiments import methods as methods_lib
from experiments.reporting import columns
from experiments.reporting import rows as rows_lib

Record = dict[str, Any]  # a row of result.json


@dataclasses.dataclass(frozen=True)
class Heading:
  """The heading of a column."""

  title: str
  meaning: str = ''


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of text cells; the first column names the rows."""

  caption: str
  headings: list[Heading]
  rows: list[list[str]]
  note: str = ''


def settings(rows: Sequence[Record]) -> list[list[Record]]:
  """Groups rows by setting; each group becomes a table."""

  def key(row):
    return tuple(row[name] for name in columns.SETTING)

  found = dict.fromkeys(map(key, rows))
  return [[row for row in rows if key(row) == one] for one in found]


def overall(rows: Sequence[Record]) -> list[Record]:
  """Returns the rows over all prompts."""
  return [row for row in rows if row['category'] == rows_lib.OVERALL]


def of_setting(rows: Sequence[Record]) -> Iterator[Table]:
  """Yields tables over all prompts, of scores, and of speedups by category."""
  all_prompts = overall(rows)
  names = columns.names(all_prompts[0])
  empty = [
    name for name in names if all(row.get(name) is None for row in all_prompts)
  ]
  shown = [name for name in names if name not in empty]
  note = ''
  if empty:
    titles = ', '.join(columns.column(name).title for name in empty)
    note = f'Not measured: {titles}.'
  yield Table(
    rows_lib.title(all_prompts[0]),
    [_heading(name) for name in shown],
    [[columns.cell(row, name) for name in shown] for row in all_prompts],
    note,
  )
  yield from _scores(rows)
  if columns.are_several(row['category'] for row in rows):
    yield from _by_category(rows)


def of_paper(paper: Record | None) -> Iterator[Table]:
  """Yields a paper's results beside ours; nothing if there is no paper."""
  if not paper:
    return
  if not paper['rows']:
    note = paper.get('note') or ''
    yield Table(f'The paper: {paper.get("source", "")}', [], [], note)
    return
  with_notes = any(row.get('note') for row in paper['rows'])
  headings = [
    Heading('row'),
    Heading('quantity'),
    Heading('paper', paper.get('source', '')),
    Heading(_ours(paper), 'with its 95% interval'),
  ]
  if with_notes:
    headings.append(Heading('note'))
  rows = []
  for row in paper['rows']:
    cells = [
      str(row['row']),
      columns.column(row['quantity']).title,
      columns.text(row.get('paper')),
      columns.with_interval(row.get('ours'), row.get('ci95'), ''),
    ]
    rows.append(cells + [row.get('note') or ''] * with_notes)
  yield Table(
    f'Beside the paper: {paper.get("source", "")}',
    headings,
    rows,
    paper.get('note') or '',
  )


def used(rows: Sequence[Record]) -> list[str]:
  """Returns the columns of the rows that have a meaning to explain."""
  found = dict.fromkeys(name for row in rows for name in row)
  return [name for name in columns.COLUMNS if name in found]


def _ours(paper: Record) -> str:
  """Returns the heading of our numbers, with the models if they are named."""
  targets = paper.get('targets')
  return f'ours, of {targets}' if targets else 'ours'


def _heading(name):
  known = columns.column(name)
  return Heading(known.title, known.meaning)


def _scores(rows):
  """Yields a table with a line per method and a column per score."""
  rows = overall(rows)
  names = list(dict.fromkeys(name for row in rows for name in row['scores']))
  if not names:
    return
  cells = [
    [row['method']] + [_score(row['scores'].get(name)) for name in names]
    for row in rows
  ]
  headings = [_heading('method'), *(Heading(name) for name in names)]
  yield Table('Scores of the texts', headings, cells)


def _score(score):
  if not isinstance(score, dict):
    return columns.text(score)
  return columns.with_interval(score.get('value'), score.get('ci95'), '.3f')


def _by_category(rows):
  """Yields a table with a line per category and a column per method."""
  cells = {(row['category'], row['method']): row for row in rows}
  methods = [
    name
    for name in dict.fromkeys(row['method'] for row in rows)
    if name != methods_lib.BASELINE
  ]
  lines = []
  for category, group in itertools.groupby(rows, lambda row: row['category']):
    line = [category, str(next(group)['prompts'])]
    for method in methods:
      row = cells.get((category, method))
      line.append(_speedup(row) if row else columns.NOTHING)
    lines.append(line)
  yield Table(
    'Speedup by category, then tokens a round',
    [
      Heading('category'),
      Heading('prompts'),
      *(Heading(method) for method in methods),
    ],
    lines,
  )


def _speedup(row):
  tokens = columns.text(row['tokens_per_round'], '.2f')
  return f'{columns.cell(row, "speedup")}, {tokens}'
