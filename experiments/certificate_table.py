"""The certificate, shown in a terminal."""

from collections.abc import Iterator
from typing import Any

import rich.box
import rich.table

from experiments import certificate as certificate_lib
from experiments import evaluation_report

Record = dict[str, Any]


def show(certificate: Record) -> None:
  """Prints a summary a section, and every planted bug."""
  console = evaluation_report.console()
  if certificate['cases']:
    console.print('\n[bold]Exact enumeration of lossless rules[/]\n')
    console.print(_cases(certificate['cases'] + certificate['lossy']))
  if certificate['statistical']:
    console.print('\n[bold]The compiled loop against the exact law[/]\n')
    console.print(_statistical(certificate['statistical']))
  if certificate['planted_bugs']:
    console.print('\n[bold]Planted bugs[/]\n')
    console.print(_planted_bugs(certificate['planted_bugs']))


def failures(certificate: Record) -> Iterator[str]:
  """A line for each entry that does not say what it should."""
  for section in certificate_lib.SECTIONS:
    for record in certificate[section]:
      if not certificate_lib.passed(record):
        facts = ', '.join(f'{name} {value}' for name, value in record.items())
        yield f'{section}: {facts}'


def _cases(records: list[Record]) -> rich.table.Table:
  table = _table(
    *('rule', 'law', 'cases', 'largest error', 'drafts kept'),
    *('of the most', 'ok'),
  )
  for rule, law in sorted({(r['verifier'], r['law']) for r in records}):
    rows = [r for r in records if (r['verifier'], r['law']) == (rule, law)]
    kept = [r['expected_accepted'] for r in rows]
    counted = 'keys' in rows[0]
    error = max(r['max_error'] for r in rows)
    lossy = rule == 'synthetic'
    table.add_row(
      rule,
      law.replace('_', ' '),
      f'{len(rows)}',
      f'{error} of {sum(r["tokens"] for r in rows)} tokens'
      if counted
      else f'{error:.1e}{" (lossy)" * lossy}',
      f'{min(kept):.2f} to {max(kept):.2f}',
      _of_the_most(rows),
      _mark(rows),
    )
  return table


def _of_the_most(rows):
  """What is kept of independent siblings, of what an exact rule could keep."""
  shares = [
    row['expected_accepted'] / row['optimal_accepted']
    for row in rows
    if row.get('optimal_accepted')
  ]
  return f'{min(shares):.0%} to {max(shares):.0%}' if shares else ''


def _statistical(records: list[Record]) -> rich.table.Table:
  table = _table(
    'drafter', 'rule', 'batch', 'chi-square', 'TV found', 'drafts kept', 'ok'
  )
  for record in records:
    kept = ''
    if 'accepted' in record:
      kept = f'{record["accepted"]:.3f} ({record["predicted_accepted"]:.3f})'
    table.add_row(
      record['drafter'],
      record['verifier'],
      record['settings'],
      f'{record["statistic"]:.0f} < {record["threshold"]:.0f}',
      f'{record["detectable_total_variation"]:.3f}',
      kept,
      _mark([record]),
    )
  return table


def _planted_bugs(records: list[Record]) -> rich.table.Table:
  table = _table('bug', 'statistic', 'threshold', 'shipped', 'caught')
  for record in records:
    table.add_row(
      record['name'],
      f'{record["statistic"]:.2g}',
      f'{record["threshold"]:.2g}',
      f'{record["shipped_statistic"]:.2g}',
      _mark([record]),
    )
  return table


def _mark(records):
  good = all(certificate_lib.passed(record) for record in records)
  return 'yes' if good else '[bold red]NO[/]'


def _table(*columns):
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for column in columns:
    table.add_column(column)
  return table
