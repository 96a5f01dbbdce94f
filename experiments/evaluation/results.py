"""The results of an evaluation: files, and what the terminal shows of them."""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib

import rich.text

from experiments import methods as methods_lib
from experiments.evaluation import audits
from experiments.evaluation import learning
from experiments.evaluation import papers
from experiments.evaluation import plots
from experiments.evaluation import suite
from experiments.evaluation import summary
from experiments.evaluation import table as table_lib
from experiments.reporting import columns
from experiments.reporting import figures
from experiments.reporting import files
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as tables_lib


def write(
  out: pathlib.PurePath,
  tables: Sequence[table_lib.Table],
  paper: papers.Paper,
) -> None:
  """Writes result.json and results.csv, and the figure of each table.

  The figure is results.png in `out` or, for a part, in the part's folder there.
  """
  rows = [row for table in tables for row in table.rows]
  data = {
    table.benchmark: dataclasses.asdict(table.provenance)
    for table in tables
    if table.provenance is not None
  }
  result = {
    'data': data,
    'rows': [dataclasses.asdict(row) for row in rows],
    'divergences': [
      {'part': table.part} | found
      for table in tables
      for found in table.divergences
    ],
  }
  windows = [
    {'part': table.part} | dataclasses.asdict(window)
    for table in tables
    for window in table.windows
  ]
  if windows:
    result['windows'] = windows
  if paper.source:
    result['paper'] = papers.to_json(paper, tables)
  result_file.write(out / result_file.EVALUATION, result)
  files.write_csv(out / 'results.csv', rows)
  for table in tables:
    overall = rows_lib.overall(table.rows)
    path = suite.folder(out, table.part) / 'results.png'
    draw = functools.partial(plots.summary, overall, rows_lib.title(overall[0]))
    figures.write_png(path, draw)


def show(
  out: pathlib.PurePath,
  tables: Sequence[table_lib.Table],
  paper: papers.Paper,
) -> None:
  """Prints the tables, and the paper's numbers beside ours."""
  for table in tables:
    _show(table)
  if paper.source:
    shown = tables_lib.console()
    found = papers.table(papers.to_json(paper, tables))
    shown.print(rich.text.Text(f'\n{found.caption}\n', 'bold'))
    if found.rows:
      shown.print(found)
    if found.note:
      shown.print(found.note)
  of_each = figures.written('generations.jsonl', 'results.png')
  if tables[0].part:
    parts = ', '.join(suite.folder(out, table.part).name for table in tables)
    print(f'\nresult.json and results.csv are in {out}')
    print(f'and in its folders {parts}: {of_each}')
  else:
    print(f'\nresult.json, results.csv, {of_each} are in {out}')


def show_so_far(table: table_lib.Table, num_prompts: int) -> None:
  """Prints the table of a run that was interrupted.

  Args:
    table: the table of the prompts that were decoded.
    num_prompts: how many prompts there are in total.
  """
  title = rows_lib.title(table.rows[0])
  shown = tables_lib.console()
  shown.print(
    rich.text.Text(f'\n{title}; so far, out of {num_prompts} prompts\n', 'bold')
  )
  shown.print(summary.brief(table.rows))


def _show(table: table_lib.Table) -> None:
  """Prints a table, and the result of comparing outputs."""
  rows = table.rows
  overall = rows_lib.overall(rows)
  shown = tables_lib.console()
  shown.print(rich.text.Text(f'\n{rows_lib.title(overall[0])}\n', 'bold'))
  shown.print(summary.brief(rows))
  methods = table.evaluation.methods.items()
  widths = {name: method.drafter.widths for name, method in methods}
  for note in (
    *summary.rest_notes(overall),
    *summary.width_notes(overall, widths),
  ):
    shown.print(note)
  for part in summary.parts(rows, with_intervals=False):
    shown.print(part.caption + '\n')
    shown.print(part)
  for detail in task_lines(table):
    shown.print(detail)
  if table.windows:
    shown.print('Drafts in the whole run and in parts of it\n')
    shown.print(columns.table(table.windows, learning.WINDOW_NAMES))
  if methods_lib.BASELINE not in table.generations:
    shown.print(
      f'no method is called {methods_lib.BASELINE}, so there is nothing to '
      'compare speed and outputs with'
    )
  for line in (
    *summary.rule_lines(overall),
    *summary.mismatch_lines(table.mismatches),
    *summary.mismatch_lines(table.refilled_mismatches, 'static batches'),
    *audits.lines(table.divergences),
  ):
    shown.print(line)


def task_lines(table: table_lib.Table) -> list[str]:
  """Explains which records are left out, and why methods have no score."""
  task, lines = table.evaluation.task, []
  if task is None or table.provenance is None:
    return []
  if left_out := table.provenance.left_out:
    lines.append(f'{task.name}: records without a text, left out: {left_out}')
  unscored = [name for name in table.generations if name not in table.scores]
  if unscored:
    reason = task.unscored() or (
      f'{", ".join(unscored)} could not be scored this time: run the same '
      'command again, which decodes nothing a second time'
    )
    lines.append(f'no score: {reason}')
  return lines
