"""What an evaluation leaves: tables in the terminal, and files."""

from collections.abc import Sequence
import dataclasses
import pathlib
import sys

import gin
import rich.box
import rich.console
import rich.table
import rich.text

from experiments import environment
from experiments import methods as methods_lib
from experiments import plots
from experiments import results
from experiments import table as table_lib

# Of a table in a file or a pipe, where no terminal says how wide it is.
_PIPE_WIDTH = 100
# As many columns as are readable there, and in most terminals.
_METHODS_A_TABLE = 5


def console() -> rich.console.Console:
  """Standard output; plain text where it is no terminal."""
  width = None if sys.stdout.isatty() else _PIPE_WIDTH
  return rich.console.Console(width=width, highlight=False)


def write(out: pathlib.PurePath, table: table_lib.Table) -> None:
  """Writes result.json, results.csv and results.png."""
  rows = write_rows(out, table)
  overall = [row for row in rows if row.category == table_lib.OVERALL]
  plots.draw(out / 'results.png', overall, title(overall[0]))


def write_rows(
  out: pathlib.PurePath, table: table_lib.Table
) -> list[results.Row]:
  """Writes result.json and results.csv; the rows."""
  rows = table.rows()
  result = environment.describe() | {
    'gin_config': gin.operative_config_str(),
    'rows': [dataclasses.asdict(row) for row in rows],
  }
  results.write_json(out / 'result.json', result)
  results.write_csv(out / 'results.csv', rows)
  return rows


def show(out: pathlib.PurePath, table: table_lib.Table) -> None:
  """Prints the tables, and what comparing the outputs found."""
  rows = table.rows()
  overall = [row for row in rows if row.category == table_lib.OVERALL]
  shown = console()
  # As a Text: a name may hold what rich takes for markup.
  shown.print(rich.text.Text(f'\n{title(overall[0])}\n', 'bold'))
  shown.print(_overall(overall))
  if len(overall) < len(rows):
    shown.print('Speedup (and tokens a round) by category\n')
    names = dict.fromkeys(row.method for row in rows)
    names.pop(methods_lib.BASELINE, None)
    for methods in _batches(list(names), _METHODS_A_TABLE):
      shown.print(_by_category(rows, methods))
  for line in mismatch_lines(table.mismatches()):
    shown.print(line)
  print(f'\nresult.json, results.csv and results.png are in {out}')


def title(row: results.Row) -> str:
  """What was decoded, of any row over all prompts."""
  return (
    f'{row.benchmark}: {row.prompts} prompts, {row.tokens} tokens, '
    f'batch {row.batch_size}, '
    f'temperature {row.temperature:g}'
  )


def _overall(rows: Sequence[results.Row]) -> rich.table.Table:
  """One line a method, over all prompts."""
  table = columns(
    'method',
    'K',
    'tokens\na round',
    'ms a\ntoken',
    '\nspeedup',
    '95%\ninterval',
    '\npredicted',
    'draft\nms',
    'verify\nms',
    'rest\nms',
    'of the\nroofline',
  )
  for row in rows:
    table.add_row(
      row.method,
      str(row.num_draft_tokens),
      f'{row.tokens_per_round:.2f}',
      f'{row.ms_per_token:.1f}',
      number(row.speedup, '.2f', 'x'),
      interval(row),
      number(row.predicted_speedup, '.2f', 'x'),
      number(row.draft_ms, '.1f'),
      number(row.verify_ms, '.1f'),
      number(row.overhead_ms, '.1f'),
      number(row.percent_of_roofline, '.0f', '%'),
    )
  return table


def _batches(items: list[str], size: int) -> list[list[str]]:
  return [items[i : i + size] for i in range(0, len(items), size)]


def _by_category(
  rows: Sequence[results.Row], shown: Sequence[str]
) -> rich.table.Table:
  """Speedup and tokens a round, a line a category, a column a method."""
  cells = {(row.category, row.method): row for row in rows}
  table = columns('category', 'prompts', *shown)
  for category in dict.fromkeys(row.category for row in rows):
    in_category = [cells[category, name] for name in shown]
    prompts = next(row.prompts for row in rows if row.category == category)
    table.add_row(
      rich.text.Text(category),
      str(prompts),
      *(
        f'{number(row.speedup, ".2f", "x")} ({row.tokens_per_round:.2f})'
        for row in in_category
      ),
    )
  return table


def mismatch_lines(found: dict[str, results.Mismatches]) -> list[str]:
  """What comparing greedy outputs with the baseline's found, one a method."""
  lines = []
  for name, count in found.items():
    if count.errors:
      lines.append(
        f'[bold red]{name}: {count.errors} outputs DIFFER from '
        f'{methods_lib.BASELINE} and are no float ties: not exact[/]'
      )
    elif count.ties:
      lines.append(
        f'[yellow]{name}: {count.ties} outputs part from '
        f'{methods_lib.BASELINE} at a float tie[/]'
      )
    else:
      lines.append(f'{name}: every output equals {methods_lib.BASELINE}')
  return lines


def columns(first: str, *others: str) -> rich.table.Table:
  """An empty table with those headings."""
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False)
  table.add_column(first, no_wrap=True, vertical='bottom')
  for name in others:
    table.add_column(name, justify='right', no_wrap=True)
  return table


def interval(row: results.Row) -> str:
  """Of the speedup, '-' where there is none."""
  if row.speedup_ci95 is None or row.method == methods_lib.BASELINE:
    return '-'
  low, high = row.speedup_ci95
  return f'{low:.2f}-{high:.2f}'


def number(value: float | None, form: str, unit: str = '') -> str:
  """As the form says, '-' for None."""
  return '-' if value is None else f'{value:{form}}{unit}'
