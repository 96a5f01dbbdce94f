"""The report of an evaluation: tables in the terminal, and files."""

from collections.abc import Callable, Sequence
import dataclasses
import pathlib

import gin
import rich.text

from experiments import methods as methods_lib
from experiments.command import environment
from experiments.evaluation import audits
from experiments.evaluation import papers
from experiments.evaluation import plots
from experiments.evaluation import row_tables
from experiments.evaluation import suite
from experiments.evaluation import table as table_lib
from experiments.reporting import columns as columns_lib
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
  result = environment.describe() | {
    'gin_config': gin.operative_config_str(),
    'data': data,
    'rows': [dataclasses.asdict(row) for row in rows],
    'divergences': [
      {'part': table.part} | found
      for table in tables
      for found in table.divergences
    ],
  }
  if paper.source:
    compared = papers.compare(paper, tables)
    result['paper'] = {
      'source': paper.source,
      'note': paper.note,
      'targets': _targets(tables),
      'rows': [dataclasses.asdict(row) for row in compared],
    }
  result_file.write(out / 'result.json', result)
  files.write_csv(out / 'results.csv', rows)
  for table in tables:
    overall = _overall_rows(table.rows)
    path = suite.folder(out, table.part) / 'results.png'
    plots.draw(path, overall, rows_lib.title(vars(overall[0])))


def _overall_rows(rows: Sequence[rows_lib.Row]) -> list[rows_lib.Row]:
  return [row for row in rows if row.category == rows_lib.OVERALL]


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
    shown.print(rich.text.Text(f'\n{paper.source}\n', 'bold'))
    if paper.rows or paper.ratios:
      shown.print(_compared(papers.compare(paper, tables), _targets(tables)))
    if paper.note:
      shown.print(paper.note)
  if tables[0].part:
    parts = ', '.join(suite.folder(out, table.part).name for table in tables)
    print(f'\nresult.json and results.csv are in {out}')
    print(f'and in its folders {parts}: {_of_each()}')
  else:
    print(f'\nresult.json, results.csv, {_of_each()} are in {out}')


def show_so_far(table: table_lib.Table, num_prompts: int) -> None:
  """Prints the table of a run that was interrupted.

  Args:
    table: the table of the prompts that were decoded.
    num_prompts: how many prompts there are in total.
  """
  overall = _overall_rows(table.rows)
  shown = tables_lib.console()
  title = (
    f'{rows_lib.title(vars(overall[0]))}; so far, out of {num_prompts} prompts'
  )
  shown.print(rich.text.Text(f'\n{title}\n', 'bold'))
  shown.print(_overall(overall))


def _targets(tables: Sequence[table_lib.Table]) -> str:
  """Returns the targets' names, the last parts of their paths or hub names."""
  paths = [pathlib.PurePath(table.evaluation.target.name) for table in tables]
  return ', '.join(dict.fromkeys(path.name for path in paths))


def _compared(
  rows: Sequence[papers.Compared], targets: str
) -> tables_lib.Table:
  """Returns a table with a line per number of the paper, and ours beside it.

  Ours are usually from other models. A line without a number of the paper has
  ours for another number of samples.
  """
  ours = f'ours, of\n{targets}' if targets else 'ours'
  before = [None, *(row.row for row in rows)]
  lines = [
    [
      '' if row.row == last else row.row,
      row.quantity,
      columns_lib.number(row.paper, 'g'),
      columns_lib.number(row.ours, '.3g'),
      f'{row.ci95[0]:.3g}-{row.ci95[1]:.3g}' if row.ci95 else '-',
    ]
    for row, last in zip(rows, before, strict=False)
  ]
  headings = ('', 'quantity', 'paper', ours, '95% interval')
  return tables_lib.Table(headings, lines)


def _show(table: table_lib.Table) -> None:
  """Prints a table, and the result of comparing outputs."""
  rows = table.rows
  overall = _overall_rows(rows)
  shown = tables_lib.console()
  shown.print(rich.text.Text(f'\n{rows_lib.title(vars(overall[0]))}\n', 'bold'))
  shown.print(_overall(overall))
  methods = table.evaluation.methods.items()
  widths = {name: method.drafter.widths for name, method in methods}
  for note in (
    *row_tables.rest_notes(overall),
    *row_tables.width_notes(overall, widths),
  ):
    shown.print(note)
  if columns_lib.are_several(row.category for row in rows):
    shown.print('Speedup (and tokens per round) by category\n')
    if any(row.method != methods_lib.BASELINE for row in rows):
      shown.print(row_tables.by_category(rows, _speedup))
  if any(row.scores for row in overall):
    shown.print(row_tables.scores(overall))
  for detail in task_lines(table):
    shown.print(detail)
  if methods_lib.BASELINE not in table.generations:
    shown.print(
      f'no method is called {methods_lib.BASELINE}, so there is nothing to '
      'compare speed and outputs with'
    )
  for line in (*rule_lines(overall), *mismatch_lines(table.mismatches)):
    shown.print(line)
  for detail in audits.lines(table.divergences):
    shown.print(detail)


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


def _of_each() -> str:
  """Returns the names of a table's files."""
  return figures.written('generations.jsonl', 'results.png')


def _overall(rows: Sequence[rows_lib.Row]) -> tables_lib.Table:
  """Returns a table with a line per method, over all prompts."""
  columns: dict[str, Callable[[rows_lib.Row], str]] = {
    'method': lambda row: row.method,
    'K': lambda row: str(row.num_draft_tokens),
    'tokens\nper round': lambda row: f'{row.tokens_per_round:.2f}',
    '\nspeedup': lambda row: columns_lib.number(row.speedup, '.2f', 'x'),
    '95%\ninterval': interval,
    'ms per\ntoken': lambda row: columns_lib.number(row.ms_per_token, '.1f'),
    'plain\nrounds': lambda row: columns_lib.number(row.plain_rounds, '.0%'),
  }
  # Columns of parts that were not timed are left out.
  if any(row.prefill_ms is not None for row in rows):
    columns |= {
      '\npredicted': lambda row: columns_lib.number(
        row.predicted_speedup, '.2f', 'x'
      ),
      'draft\nms': lambda row: columns_lib.number(row.draft_ms, '.1f'),
      'verify\nms': lambda row: columns_lib.number(row.verify_ms, '.1f'),
      'rest\nms': lambda row: columns_lib.number(row.overhead_ms, '.1f'),
    }
  columns['of the\nroofline'] = lambda row: columns_lib.number(
    row.percent_of_roofline, '.0f', '%'
  )
  return tables_lib.Table(
    list(columns), [[cell(row) for cell in columns.values()] for row in rows]
  )


def _speedup(row: rows_lib.Row) -> str:
  """Returns the speedup, with tokens per round in parentheses."""
  speedup = columns_lib.number(row.speedup, '.2f', 'x')
  return f'{speedup} ({row.tokens_per_round:.2f})'


def rule_lines(rows: Sequence[rows_lib.Row]) -> list[rich.text.Text]:
  """Returns warnings of lossy rules; if sampling, also rules and draft kinds.

  Args:
    rows: the rows of all methods, over all prompts.
  """
  lines = [
    rich.text.Text(
      f'{row.method}: verify.{row.verifier} is lossy: this is not the '
      "target's distribution",
      'bold yellow',
    )
    for row in rows
    if not row.lossless
  ]
  drafted = [row for row in rows if row.num_draft_tokens]
  if drafted and drafted[0].temperature > 0:
    rules = [f'{row.method} {row.verifier} ({row.law})' for row in drafted]
    lines.append(
      rich.text.Text(f'rules, and the kinds of drafts: {", ".join(rules)}')
    )
  return lines


def mismatch_lines(
  found: dict[str, rows_lib.Mismatches],
) -> list[rich.text.Text]:
  """Says for each method how its greedy outputs compare with the baseline's."""
  lines = []
  for name, count in found.items():
    if count.errors:
      text, style = (
        f'{count.errors} outputs DIFFER from {methods_lib.BASELINE}, and not '
        'at float ties: not exact',
        'bold red',
      )
    elif count.unaudited:
      text, style = (
        f'{count.unaudited} outputs differ from {methods_lib.BASELINE} and '
        'could not be audited: they may or may not differ at float ties',
        'bold red',
      )
    elif count.ties:
      text, style = (
        f'{count.ties} outputs differ from {methods_lib.BASELINE} at a float '
        'tie',
        'yellow',
      )
    else:
      text, style = f'every output equals {methods_lib.BASELINE}', ''
    lines.append(rich.text.Text(f'{name}: {text}', style))
  return lines


def interval(row: rows_lib.Row) -> str:
  """Returns the interval of the speedup, '-' if there is none."""
  if row.speedup_ci95 is None or row.method == methods_lib.BASELINE:
    return '-'
  low, high = row.speedup_ci95
  return f'{low:.2f}-{high:.2f}'
