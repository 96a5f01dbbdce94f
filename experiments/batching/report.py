"""The results of a throughput comparison: a table, and throughput.json."""

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import gin
import rich.text

from experiments import methods as methods_lib
from experiments.batching import audits as audits_lib
from experiments.batching import comparison as comparison_lib
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.evaluation import audits
from experiments.reporting import columns
from experiments.reporting import ratios
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One method, decoded both ways. Seconds are totals over all requests."""

  method: str
  drafter: str
  num_draft_tokens: int
  temperature: float
  batch_size: int
  requests: int
  prompt_tokens: int  # of all requests
  tokens: int  # emitted for all requests
  static_seconds: list[float]  # one per repeat
  refilled_seconds: list[float]
  static_tokens_per_s: float  # both rates include the prefill
  refilled_tokens_per_s: float
  ratio: float | None  # refilled over static; None if nothing was emitted
  ratio_ci95: list[float] | None  # over repeats; None for fewer than three
  different: int  # outputs that differ between the two ways
  ties: int  # those of them that part at a float tie
  # Whether differences are audited; if so, any others are faults.
  audited: bool
  unaudited: int = 0  # those whose audit failed, for example for lack of memory


def rows(
  comparison: comparison_lib.Comparison, journal: journal_lib.Journal
) -> list[Row]:
  """Returns one row per method."""
  return [
    _row(comparison, name, method, journal)
    for name, method in comparison.evaluation.methods.items()
  ]


def _row(comparison, name, method, journal) -> Row:
  static, refilled = (
    [journal[way, name, repeat] for repeat in range(comparison.repeats)]
    for way in (comparison_lib.STATIC, comparison_lib.REFILLED)
  )
  base, runs = _generations(static), _generations(refilled)
  measured = ratios.measure(runs, base)
  # With greedy decoding, the other repeats have the same outputs.
  first, first_base = (
    [run for run in both if run.batch == 0] for both in (runs, base)
  )
  found = audits.mismatches(
    name,
    [run.tokens for run in first],
    [run.tokens for run in first_base],
    journal.of(audits.KIND),
  )
  seconds = lambda records: [record['seconds'] for record in records]
  per_second = lambda runs: (
    sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)
  )
  return Row(
    method=name,
    drafter=methods_lib.file_name(method.drafter),
    num_draft_tokens=method.drafter.num_draft_tokens,
    temperature=float(comparison.evaluation.sampling.temperature),
    batch_size=comparison.evaluation.batch_size,
    requests=len(first),
    prompt_tokens=sum(run.prompt_tokens for run in first),
    tokens=sum(len(run.tokens) for run in first),
    static_seconds=seconds(static),
    refilled_seconds=seconds(refilled),
    static_tokens_per_s=per_second(base),
    refilled_tokens_per_s=per_second(runs),
    ratio=measured['speedup'],
    ratio_ci95=measured['speedup_ci95'],
    different=found.ties + found.not_ties,
    ties=found.ties,
    unaudited=found.unaudited,
    audited=audits_lib.is_audited(comparison, name),
  )


def _generations(records) -> list[rows_lib.Generation]:
  """Returns all generations; a repeat is a batch, the unit of intervals."""
  return [
    dataclasses.replace(rows_lib.Generation.from_json(one), batch=repeat)
    for repeat, record in enumerate(records)
    for one in record['generations']
  ]


def write(
  out: pathlib.PurePath,
  rows: Sequence[Row],
  divergences: Sequence[dict[str, Any]],
) -> None:
  """Writes throughput.json; `divergences` are the values of the audit units."""
  result = environment.describe() | {
    'gin_config': gin.operative_config_str(),
    'rows': [dataclasses.asdict(row) for row in rows],
    'divergences': divergences,
  }
  result_file.write(out / 'throughput.json', result)


def show(
  out: pathlib.PurePath,
  rows: Sequence[Row],
  divergences: Sequence[dict[str, Any]],
  prompts: str,
) -> None:
  """Prints the table, and whether both ways gave the same outputs."""
  shown = tables.console()
  first = rows[0]
  title = (
    f'{prompts}: {first.requests} requests, {first.prompt_tokens} tokens in, '
    f'batch {first.batch_size}, temperature {first.temperature:g}'
  )
  shown.print(rich.text.Text(f'\n{title}\n', 'bold'))
  shown.print(_table(rows))
  for row in rows:
    shown.print(_agreement(row))
  for detail in audits.lines(
    divergences, comparison_lib.STATIC, 'throughput.json'
  ):
    shown.print(detail)
  print(f'\nthroughput.json is in {out}')


def _table(rows: Sequence[Row]) -> tables.Table:
  headings = (
    *('method', 'K', 'tokens\nout', 'static\ntokens/s', 'refilled\ntokens/s'),
    *('\nratio', '95%\ninterval'),
  )
  lines = [
    [
      row.method,
      str(row.num_draft_tokens),
      str(row.tokens),
      f'{row.static_tokens_per_s:.1f}',
      f'{row.refilled_tokens_per_s:.1f}',
      columns.number(row.ratio, '.2f', 'x'),
      '-'.join(f'{x:.2f}' for x in row.ratio_ci95 or ()) or '-',
    ]
    for row in rows
  ]
  return tables.Table(headings, lines)


def _agreement(row: Row) -> rich.text.Text:
  errors = row.different - row.ties - row.unaudited
  if not row.different:
    text, style = 'every output is the same both ways', ''
  elif not row.audited:
    where = 'above temperature 0' if row.temperature else 'by a lossy rule'
    text, style = (
      f'{row.different} outputs differ; {where} a rounding is enough for that',
      'yellow',
    )
  elif errors:
    text, style = f'{errors} outputs DIFFER, and not at float ties', 'bold red'
  elif row.unaudited:
    text, style = (
      f'{row.unaudited} outputs differ and could not be audited: whether at '
      'float ties is not known',
      'bold red',
    )
  else:
    text, style = (
      f'{row.ties} outputs differ at a float tie, the others are the same both '
      'ways',
      'yellow',
    )
  return rich.text.Text(f'{row.method}: {text}', style)
