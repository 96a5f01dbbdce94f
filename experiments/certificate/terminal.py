"""The certificate, shown in a terminal."""

import collections
from collections.abc import Iterator
from typing import Any

import rich.box
import rich.table
import rich.text

from experiments.certificate import certificate as certificate_lib
from experiments.reporting import tables

Record = dict[str, Any]


def show(certificate: Record) -> None:
  """Prints a summary of each section, and every planted bug."""
  console = tables.console()
  if certificate['cases'] or certificate['lossy']:
    console.print('\nExact enumeration of lossless rules\n', style='bold')
    console.print(_cases(certificate['cases'], certificate['lossy']))
  if certificate['statistical']:
    console.print('\nThe compiled loop against the exact law\n', style='bold')
    console.print(_statistical(certificate['statistical']))
  if certificate['choices']:
    console.print('\nBest tokens, found without all logits\n', style='bold')
    console.print(_choices(certificate['choices']))
  if certificate['planted_bugs']:
    console.print('\nPlanted bugs\n', style='bold')
    console.print(_planted_bugs(certificate['planted_bugs']))


def failures(certificate: Record) -> Iterator[str]:
  """Yields a line for each entry that does not show what it should."""
  for section in certificate_lib.SECTIONS:
    for record in certificate[section]:
      if not certificate_lib.passed(record):
        facts = ', '.join(f'{name} {value}' for name, value in record.items())
        yield f'{section}: {facts}'


def _cases(lossless: list[Record], lossy: list[Record]) -> rich.table.Table:
  table = _table(
    *('rule', 'law', 'cases', 'largest error', 'drafts kept'),
    *('of the most', 'ok'),
  )
  records = lossless + lossy
  for rule, kind in sorted({(r['verifier'], r['law']) for r in records}):
    rows = [r for r in records if (r['verifier'], r['law']) == (rule, kind)]
    kept = [r['expected_accepted'] for r in rows]
    counted = 'keys' in rows[0]
    errors = [r['max_error'] for r in rows]
    error = None if None in errors else (sum if counted else max)(errors)
    deviation = ''
    if rows[0] in lossy:
      distances = [r['total_variation'] for r in rows]
      deviation = f' (lossy, TV {_range(distances, ".2f")})'
    table.add_row(
      rule,
      kind.replace('_', ' '),
      f'{len(rows)}',
      f'{error} of {sum(r["tokens"] for r in rows)} tokens'
      if counted
      else f'{_number(error, ".1e")}{deviation}',
      _range(kept, '.2f'),
      _of_the_most(rows),
      _mark(rows),
    )
  return table


def _of_the_most(rows):
  """Returns the range of kept siblings, as shares of the optimum."""
  shares = [
    row['expected_accepted'] / row['optimal_accepted']
    for row in rows
    if row.get('optimal_accepted') and row['expected_accepted'] is not None
  ]
  return _range(shares, '.0%')


def _statistical(records: list[Record]) -> rich.table.Table:
  table = _table(
    'drafter', 'rule', 'batch', 'chi-square', 'TV found', 'drafts kept', 'ok'
  )
  for record in records:
    kept = ''
    if 'accepted' in record:
      kept = (
        f'{_number(record["accepted"], ".3f")} '
        f'({_number(record["predicted_accepted"], ".3f")})'
      )
    table.add_row(
      record['drafter'],
      record['verifier'],
      record['settings'],
      f'{_number(record["statistic"], ".0f")} < {record["threshold"]:.0f}',
      f'{record["detectable_total_variation"]:.3f}',
      kept,
      _mark([record]),
    )
  return table


def _choices(records: list[Record]) -> rich.table.Table:
  table = _table(
    *('settings', 'positions', 'wrong', 'bounds missed'),
    *('few scored', 'all scored', 'ok'),
  )
  for setting in dict.fromkeys(record['settings'] for record in records):
    rows = [record for record in records if record['settings'] == setting]
    numbers = collections.Counter[int]()
    for row in rows:
      # JSON has made the numbers text in a run that was resumed.
      numbers.update({int(n): count for n, count in row['scored'].items()})
    whole = numbers[max(numbers)]
    table.add_row(
      setting,
      f'{numbers.total()}',
      f'{sum(row["wrong"] for row in rows)}',
      f'{sum(row["missed_bounds"] for row in rows)}',
      f'{numbers.total() - whole}',
      f'{whole}',
      _mark(rows),
    )
  return table


def _planted_bugs(records: list[Record]) -> rich.table.Table:
  table = _table('bug', 'statistic', 'threshold', 'shipped', 'caught')
  for record in records:
    table.add_row(
      record['name'],
      *(
        _number(record[name], '.2g')
        for name in ('statistic', 'threshold', 'shipped_statistic')
      ),
      _mark([record]),
    )
  return table


def _number(value: float | None, spec: str) -> str:
  """Formats a number; None, which stands for NaN or infinity, becomes NaN."""
  return 'NaN' if value is None else format(value, spec)


def _range(values, spec: str) -> str:
  if not values:
    return ''
  if None in values:
    return _number(None, spec)
  return f'{_number(min(values), spec)} to {_number(max(values), spec)}'


def _mark(records):
  good = all(certificate_lib.passed(record) for record in records)
  return 'yes' if good else rich.text.Text('NO', 'bold red')


def _table(*columns):
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
  for column in columns:
    table.add_column(column, overflow='fold')
  return table
