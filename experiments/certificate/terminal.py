"""The certificate, shown in a terminal."""

import collections
from collections.abc import Iterator
from typing import Any

from experiments.certificate import certificate as certificate_lib
from experiments.reporting import tables

Record = dict[str, Any]


def show(certificate: Record) -> None:
  """Prints a summary of each section, and every planted bug."""
  console = tables.console()
  for title, table in _tables(certificate):
    console.print(f'\n{title}\n', style='bold')
    console.print(table)


def _tables(certificate: Record) -> Iterator[tuple[str, tables.Table]]:
  cases, lossy = certificate['cases'], certificate['lossy']
  if cases or lossy:
    yield 'Exact enumeration of lossless rules', _cases(cases, lossy)
  for section, title, table in (
    ('statistical', 'The compiled loop against the exact law', _statistical),
    ('choices', 'Best tokens, found without all logits', _choices),
    ('planted_bugs', 'Planted bugs', _planted_bugs),
  ):
    if certificate[section]:
      yield title, table(certificate[section])


def failures(certificate: Record) -> Iterator[str]:
  """Yields a line for each entry that does not show what it should."""
  for section in certificate_lib.SECTIONS:
    for record in certificate[section]:
      if not certificate_lib.passed(record):
        facts = ', '.join(f'{name} {value}' for name, value in record.items())
        yield f'{section}: {facts}'


def _cases(lossless: list[Record], lossy: list[Record]) -> tables.Table:
  columns = 'rule', 'law', 'cases', 'largest error', 'drafts kept'
  lines = []
  records = lossless + lossy
  for rule, kind in sorted({(r['verifier'], r['law']) for r in records}):
    rows = [r for r in records if (r['verifier'], r['law']) == (rule, kind)]
    errors = [r['max_error'] for r in rows]
    if 'keys' in rows[0]:
      wrong = None if None in errors else sum(errors)
      error = f'{wrong} of {sum(r["tokens"] for r in rows)} tokens'
    else:
      error = _number(None if None in errors else max(errors), '.1e')
    if rows[0] in lossy:
      distances = [r['total_variation'] for r in rows]
      error += f' (lossy, TV {_range(distances, ".2f")})'
    kept = _range([r['expected_accepted'] for r in rows], '.2f')
    # Kept siblings, as shares of the optimum.
    shares = [
      row['expected_accepted'] / row['optimal_accepted']
      for row in rows
      if row.get('optimal_accepted') and row['expected_accepted'] is not None
    ]
    line = [rule, kind.replace('_', ' '), str(len(rows)), error, kept]
    lines.append([*line, _range(shares, '.0%'), _mark(rows)])
  return tables.Table([*columns, 'of the most', 'ok'], lines)


def _statistical(records: list[Record]) -> tables.Table:
  columns = 'drafter', 'rule', 'batch', 'chi-square', 'TV found', 'drafts kept'
  lines = []
  for record in records:
    statistic = _number(record['statistic'], '.0f')
    kept = ''
    if 'accepted' in record:
      predicted = _number(record['predicted_accepted'], '.3f')
      kept = f'{_number(record["accepted"], ".3f")} ({predicted})'
    line = [record[name] for name in ('drafter', 'verifier', 'settings')]
    line.append(f'{statistic} < {record["threshold"]:.0f}')
    line.append(f'{record["detectable_total_variation"]:.3f}')
    lines.append([*line, kept, _mark([record])])
  return tables.Table([*columns, 'ok'], lines)


def _choices(records: list[Record]) -> tables.Table:
  columns = 'settings', 'positions', 'wrong', 'bounds missed', 'few scored'
  lines = []
  for setting in dict.fromkeys(record['settings'] for record in records):
    rows = [record for record in records if record['settings'] == setting]
    numbers = collections.Counter[int]()
    for row in rows:
      # JSON has made the numbers text in a run that was resumed.
      numbers.update({int(n): count for n, count in row['scored'].items()})
    whole = numbers[max(numbers)]
    wrong, missed = (
      sum(row[name] for row in rows) for name in ('wrong', 'missed_bounds')
    )
    counts = numbers.total(), wrong, missed, numbers.total() - whole, whole
    lines.append([setting, *map(str, counts), _mark(rows)])
  return tables.Table([*columns, 'all scored', 'ok'], lines)


def _planted_bugs(records: list[Record]) -> tables.Table:
  names = 'statistic', 'threshold', 'shipped_statistic'
  lines = [
    [
      record['name'],
      *(_number(record[name], '.2g') for name in names),
      _mark([record]),
    ]
    for record in records
  ]
  columns = ['bug', 'statistic', 'threshold', 'shipped', 'caught']
  return tables.Table(columns, lines)


def _number(value: float | None, spec: str) -> str:
  """Formats a number; None, which stands for NaN or infinity, becomes NaN."""
  return 'NaN' if value is None else format(value, spec)


def _range(values, spec: str) -> str:
  if not values:
    return ''
  if None in values:
    return _number(None, spec)
  return f'{_number(min(values), spec)} to {_number(max(values), spec)}'


def _mark(records: list[Record]) -> str:
  return 'yes' if all(map(certificate_lib.passed, records)) else 'NO'
