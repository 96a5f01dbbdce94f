"""The tables of a page: an evaluation's, and its comparison with a paper."""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

from experiments.evaluation import row_tables
from experiments.reporting import columns
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as tables_lib

Record = dict[str, Any]  # a row of result.json


def settings(rows: Sequence[Record]) -> list[list[Record]]:
  """Groups rows by setting; each group becomes a table."""

  def key(row):
    return tuple(row[name] for name in columns.SETTING)

  found = dict.fromkeys(map(key, rows))
  return [[row for row in rows if key(row) == one] for one in found]


def overall(rows: Sequence[Record]) -> list[Record]:
  """Returns the rows over all prompts."""
  return [row for row in rows if row['category'] == rows_lib.OVERALL]


def of_setting(rows: Sequence[Record]) -> Iterator[tables_lib.Table]:
  """Yields tables over all prompts, of scores, and of speedups by category."""
  all_prompts = overall(rows)
  yield _of_columns(
    all_prompts,
    columns.MAIN,
    'All prompts',
    row_tables.acceptance_notes(list(map(to_row, all_prompts))),
  )
  if any(row['scores'] for row in all_prompts):
    yield row_tables.scores([to_row(row) for row in all_prompts])
  if columns.are_several(row['category'] for row in rows):
    yield row_tables.by_category([to_row(row) for row in rows], _speedup)


def in_detail(rows: Sequence[Record]) -> Iterator[tables_lib.Table]:
  """Yields the columns over all prompts that `of_setting` leaves out."""
  all_prompts = overall(rows)
  grouped = {*columns.MAIN, *columns.TIMES}
  others = [x for x in columns.names(all_prompts[0]) if x not in grouped]
  yield _of_columns(
    all_prompts,
    ('method', *columns.TIMES),
    'Times, and what they predict',
    row_tables.rest_notes(list(map(to_row, all_prompts))),
  )
  yield _of_columns(
    all_prompts, ('method', *others), 'Drafters, rules and counts'
  )


def _of_columns(rows, names, caption, notes=()) -> tables_lib.Table:
  """Returns the columns with a value; a note names the others."""
  is_empty = lambda name: all(row.get(name) is None for row in rows)
  shown = {name: columns.column(name) for name in names if not is_empty(name)}
  empty = [columns.column(name).title for name in names if is_empty(name)]
  missing = [f'Not measured: {", ".join(empty)}.'] if empty else []
  return tables_lib.Table(
    [one.title for one in shown.values()],
    [[columns.cell(row, name) for name in shown] for row in rows],
    caption,
    ' '.join([*notes, *missing]),
    {one.title: one.meaning for one in shown.values()},
  )


def to_row(record: Record) -> rows_lib.Row:
  """Returns a row of result.json without the fields that are not known."""
  names = [field.name for field in dataclasses.fields(rows_lib.Row)]
  return rows_lib.Row(**{name: record[name] for name in names})


def of_paper(paper: Record | None) -> Iterator[tables_lib.Table]:
  """Yields a paper's results beside ours; nothing if there is no paper."""
  if not paper:
    return
  source, note = paper.get('source', ''), paper.get('note') or ''
  if not paper['rows']:
    yield tables_lib.Table([], [], f'The paper: {source}', note)
    return
  targets = paper.get('targets')
  ours = f'ours, of {targets}' if targets else 'ours'
  yield tables_lib.Table(
    ['row', 'quantity', 'paper', ours],
    [
      [
        str(row['row']),
        columns.column(row['quantity']).title,
        columns.text(row.get('paper')),
        columns.with_interval(row.get('ours'), row.get('ci95'), ''),
      ]
      for row in paper['rows']
    ],
    f'Beside the paper: {source}',
    note,
    {'paper': source, ours: 'with its 95% interval'},
  )


def used(rows: Sequence[Record]) -> list[str]:
  """Returns the columns of the rows that have a meaning to explain."""
  found = dict.fromkeys(name for row in rows for name in row)
  return [name for name in columns.COLUMNS if name in found]


def _speedup(row: rows_lib.Row) -> str:
  """Returns the speedup with its interval, then tokens per round."""
  speedup = columns.with_interval(row.speedup, row.speedup_ci95, '.2f')
  return f'{speedup}, {row.tokens_per_round:.2f}'
