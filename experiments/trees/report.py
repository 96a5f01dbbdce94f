"""The report of an ablation of trees: a table in the terminal, and files."""

from collections.abc import Sequence
import dataclasses
import pathlib

import gin
import rich.text

from experiments.command import environment
from experiments.evaluation import audits
from experiments.evaluation import report
from experiments.evaluation import table as table_lib
from experiments.reporting import columns
from experiments.reporting import figures
from experiments.reporting import files
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables
from experiments.trees import plot
from experiments.trees import rows as tree_rows
from experiments.trees import stages

_LEGEND = """\
* has the highest speedup by the cost model, whose tokens per round and speedups
are in the columns 'model'. 'of chain' is tokens per round divided by the
chain's; compare it at temperature 0 or with drafts of the same kind, which is
in the column 'law'. 'rule' is the share of a round that the verifier takes to
decide, a part of the rest. Trees of N nodes were built from what was kept on
these same prompts: other text keeps less.
"""


def write(
  out: pathlib.PurePath,
  compared: stages.Compared,
  table: table_lib.Table,
) -> list[tree_rows.TreeRow]:
  """Writes the evaluation's result.json and results.csv, and the trees' files.

  These are trees.json, trees.csv and trees.png. Returns the rows of the trees.
  """
  first, *_ = report.write_rows(out, [table])
  rows = tree_rows.rows(compared, table)
  by_drafter = {
    name: {
      'acceptance': counts.acceptance.tolist(),  # [depth][rank]
      'tried': counts.tried,
      'costs': dataclasses.asdict(compared.costs[name]),
    }
    for name, counts in compared.counts.items()
  }
  content = environment.describe() | {
    'gin_config': gin.operative_config_str(),
    'drafters': by_drafter,
    'rows': [dataclasses.asdict(row) for row in rows],
  }
  result_file.write(out / 'trees.json', content)
  files.write_csv(out / 'trees.csv', rows)
  plot.draw(out / 'trees.png', rows, rows_lib.title(vars(first)))
  return rows


def show(
  out: pathlib.PurePath,
  rows: Sequence[tree_rows.TreeRow],
  table: table_lib.Table,
) -> None:
  """Prints a line per tree, and the differences between outputs."""
  shown = tables.console()
  title = rows_lib.title(vars(table.rows[0]))
  shown.print(rich.text.Text(f'\n{title}\n', 'bold'))
  for drafter in dict.fromkeys(row.drafter for row in rows):
    shown.print(_of_drafter([row for row in rows if row.drafter == drafter]))
  shown.print(_LEGEND)
  for line in report.mismatch_lines(table.mismatches):
    shown.print(line)
  for detail in audits.lines(table.divergences):
    shown.print(detail)
  names = ('result.json', 'trees.json', 'trees.csv', 'trees.png')
  print(f'\n{figures.written(*names)} are in {out}')


def _of_drafter(rows) -> tables.Table:
  """Tabulates each tree's shape, tokens per round, times and speedups."""
  headings = (
    *(rows[0].drafter, 'N', 'deep', '\nlaw'),
    *('tokens\nmodel', 'a\nround', 'of\nchain'),
    *('draft\nms', 'verify\nms', 'rest\nms', '\nrule'),
    *('speed\nmodel', '\nup', '95%\ninterval'),
  )
  number = columns.number
  lines = [
    [
      f'{row.topology}{" *" if row.is_chosen else ""}',
      str(row.num_nodes),
      str(row.depth),
      row.law.replace('_', ' '),
      number(row.expected_tokens, '.2f'),
      number(row.tokens_per_round, '.2f'),
      number(row.over_chain, '.2f'),
      number(row.draft_ms, '.1f'),
      number(row.verify_ms, '.1f'),
      number(row.overhead_ms, '.1f'),
      number(100 * row.judge_ms / row.round_ms, '.1f', '%'),
      number(row.predicted_speedup, '.2f', 'x'),
      number(row.speedup, '.2f', 'x'),
      report.interval(row),
    ]
    for row in rows
  ]
  return tables.Table(headings, lines)
