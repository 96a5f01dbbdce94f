"""The results of an evaluation: tables and sentences, on a terminal, in files.

The page of results shows the same tables.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from experiments.evaluation import table as table_lib
from experiments.reporting import figures
from experiments.reporting import files
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as tables_lib
from experiments.reporting.rows import Row

# The columns over all prompts in the terminal.
_BRIEF = (
  *('method', 'num_draft_tokens', 'tokens_per_round', 'speedup'),
  *('speedup_ci95', 'ms_per_token', 'plain_rounds', 'predicted_speedup'),
  *('draft_ms', 'verify_ms', 'overhead_ms', 'percent_of_roofline'),
)
# Those of the page's first table; fields that no group has are in the last.
_MAIN = (
  *('method', 'num_draft_tokens', 'tokens_per_round', 'acceptance'),
  *('ms_per_token', 'speedup', 'lossless', 'outputs_differing'),
)
_TIMES = (
  *('draft_ms', 'verify_ms', 'verify_ms_by_width', 'overhead_ms'),
  *('prefill_ms', 'cost_ratio', 'percent_of_roofline'),
  *('predicted_speedup', 'leviathan_speedup', 'mean_speedup'),
)
_REFILLED = (
  *('method', 'ms_per_token', 'refilled_ms_per_token', 'refilled_speedup'),
  *('refilled_differing', 'refilled_tied'),
)
# In the title of a table, or beside the value.
_ELSEWHERE = (
  *('part', 'benchmark', 'category', 'temperature', 'batch_size'),
  'speedup_ci95',
)


def write(
  out: pathlib.PurePath,
  tables: Sequence[table_lib.Table],
  paper: papers.Paper,
) -> None:
  """Writes result.json and results.csv, and the figure of each table.

  The figure is results.png in `out` or, for a part, in the part's folder there.
  """
  rows = [row for table in tables for row in table.rows]
  result = {
    'data': {
      table.benchmark: dataclasses.asdict(table.provenance)
      for table in tables
      if table.provenance is not None
    },
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
  console = tables_lib.console()
  for table in tables:
    for one in _shown(table):
      console.print(one)
  if paper.source:
    found = papers.table(papers.to_json(paper, tables))
    console.print(_heading(found.caption))
    if found.rows:
      console.print(found)
    if found.note:
      console.print(found.note)
  of_each = figures.written('generations.jsonl', 'results.png')
  if tables[0].part:
    folders = ', '.join(suite.folder(out, table.part).name for table in tables)
    print(f'\nresult.json and results.csv are in {out}')
    print(f'and in its folders {folders}: {of_each}')
  else:
    print(f'\nresult.json, results.csv, {of_each} are in {out}')


def _shown(
  table: table_lib.Table,
) -> Iterator[str | rich.text.Text | tables_lib.Table]:
  """Yields what the terminal shows of a setting."""
  rows = table.rows
  overall = rows_lib.overall(rows)
  yield _heading(rows_lib.title(overall[0]))
  yield brief(rows)
  yield from rest_notes(overall)
  for part in parts(rows, with_intervals=False):
    yield part.caption + '\n'
    yield part
  yield from task_lines(table)
  if table.windows:
    yield 'Drafts in the whole run and in parts of it\n'
    yield tables_lib.table(table.windows, learning.WINDOW_NAMES)
  if methods_lib.BASELINE not in table.generations:
    yield (
      f'no method is called {methods_lib.BASELINE}, so there is nothing to '
      'compare speed and outputs with'
    )
  yield from rule_lines(overall)
  yield from mismatch_lines(table.mismatches)
  yield from mismatch_lines(table.refilled_mismatches, 'static batches')
  yield from audits.lines(table.divergences)


def _heading(text: str) -> rich.text.Text:
  return rich.text.Text(f'\n{text}\n', 'bold')


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


def brief(rows: Sequence[Row]) -> tables_lib.Table:
  """Returns the terminal's table over all prompts, a line per method."""
  return tables_lib.table(rows_lib.overall(rows), _BRIEF, with_intervals=False)


def main(rows: Sequence[Row]) -> tables_lib.Table:
  """Returns the page's first table over all prompts, a line per method."""
  overall = rows_lib.overall(rows)
  notes = acceptance_notes(overall)
  return tables_lib.table(overall, _MAIN, 'All prompts', notes)


def parts(
  rows: Sequence[Row], *, with_intervals: bool
) -> Iterator[tables_lib.Table]:
  """Yields the tables of categories, of scores and of refilled rows, if any."""
  if rows_lib.are_several(row.category for row in rows) and any(
    row.method != methods_lib.BASELINE for row in rows
  ):
    yield by_category(rows, with_intervals=with_intervals)
  overall = rows_lib.overall(rows)
  if any(row.scores for row in overall):
    yield scores(overall)
  if any(row.refilled_ms_per_token is not None for row in overall):
    yield tables_lib.table(
      overall, _REFILLED, 'Static batches and refilled rows'
    )


def in_detail(rows: Sequence[Row]) -> Iterator[tables_lib.Table]:
  """Yields the columns over all prompts that `main` leaves out."""
  overall = rows_lib.overall(rows)
  grouped = {*_MAIN, *_TIMES, *_REFILLED, *_ELSEWHERE}
  others = [name for name in tables_lib.columns(Row) if name not in grouped]
  yield tables_lib.table(
    overall,
    ('method', *_TIMES),
    'Times, and what they predict',
    rest_notes(overall),
  )
  yield tables_lib.table(
    overall, ('method', *others), 'Drafters, rules and counts'
  )


def scores(rows: Sequence[Row]) -> tables_lib.Table:
  """Returns a table with a line per method and a column per score."""
  names = list(dict.fromkeys(name for row in rows for name in row.scores))
  return tables_lib.Table(
    ['method', *names],
    [
      [row.method, *(_score(row.scores.get(name)) for name in names)]
      for row in rows
    ],
    caption='Scores of the texts',
  )


def _score(score) -> str:
  if score is None:
    return tables_lib.NOTHING
  return tables_lib.with_interval(score['value'], score['ci95'], '.3f')


def by_category(
  rows: Sequence[Row], *, with_intervals: bool
) -> tables_lib.Table:
  """Returns a table with a line per category and a column per method."""

  def cell(row: Row | None) -> str:
    if row is None:
      return tables_lib.NOTHING
    ci95 = row.speedup_ci95 if with_intervals else None
    speedup = tables_lib.with_interval(row.speedup, ci95, '.2f', 'x')
    return f'{speedup}, {row.tokens_per_round:.2f}'

  found = {(row.category, row.method): row for row in rows}
  prompts = {row.category: row.prompts for row in rows}
  names = dict.fromkeys(row.method for row in rows)
  names.pop(methods_lib.BASELINE, None)
  return tables_lib.Table(
    ['category', 'prompts', *names],
    [
      [
        category,
        str(count),
        *(cell(found.get((category, name))) for name in names),
      ]
      for category, count in prompts.items()
    ],
    caption='Speedup by category, then tokens per round',
  )


def rest_notes(rows: Sequence[Row]) -> list[str]:
  """Returns a sentence that explains a negative rest, if there is one."""
  if all((row.overhead_ms or 0) >= 0 for row in rows):
    return []
  return [
    'A negative rest is noise: the parts of a round were timed separately from '
    'the whole.'
  ]


def acceptance_notes(rows: Sequence[Row]) -> list[str]:
  """Returns a sentence if an acceptance exceeds that of every position."""
  if all(
    (row.acceptance or 0)
    <= max(filter(None, row.acceptance_by_position), default=1)
    for row in rows
  ):
    return []
  return [
    'The acceptance may exceed that of every position: it counts only the '
    'draft tokens that verification reached, whereas a position counts every '
    'round that drafted a token there, also after an earlier rejection.'
  ]


def rule_lines(rows: Sequence[Row]) -> list[rich.text.Text]:
  """Returns warnings of lossy rules, and rules and draft kinds if sampling."""
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
  found: Mapping[str, rows_lib.Mismatches], other: str = methods_lib.BASELINE
) -> list[rich.text.Text]:
  """Says for each method how its outputs compare with those of `other`."""
  lines = []
  for name, count in found.items():
    text, style = f'every output equals {other}', ''
    if count.ties:
      text = f'{count.ties} outputs differ from {other} at a float tie'
      style = 'yellow'
    if count.unaudited:
      text = (
        f'{count.unaudited} outputs differ from {other} and could not be '
        'audited: they may or may not differ at float ties'
      )
      style = 'bold red'
    if count.errors:
      text = (
        f'{count.errors} outputs DIFFER from {other}, and not at float ties: '
        'not exact'
      )
      style = 'bold red'
    lines.append(rich.text.Text(f'{name}: {text}', style))
  return lines
