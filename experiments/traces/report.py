"""The report of a replay: a table in the terminal, and replay.json."""

from collections.abc import Sequence
import dataclasses
import pathlib

import gin

from experiments.command import environment
from experiments.reporting import columns
from experiments.reporting import result_file
from experiments.reporting import tables
from experiments.traces import replaying
from experiments.traces import trace_file


def write(
  out: pathlib.PurePath, trace: trace_file.Trace, rows: Sequence[replaying.Row]
) -> None:
  """Writes replay.json."""
  result = environment.describe() | {
    'gin_config': gin.operative_config_str(),
    'trace': trace.header,
    'rows': [dataclasses.asdict(row) for row in rows],
  }
  result_file.write(out / 'replay.json', result)


def show(
  out: pathlib.PurePath, trace: trace_file.Trace, rows: Sequence[replaying.Row]
) -> None:
  """Prints the table, and how much of the distributions has no column."""
  header, console = trace.header, tables.console()
  console.print(
    f'{header["method"]}: {len(trace.arrays["output"])} prompts, '
    f'{len(trace.arrays["round"])} rounds, drafts of kind {header["law"]}',
  )
  headings = (
    'variant',
    *('drafted\nper round', 'kept\nper round', 'tokens\nper round'),
    *('95%\ninterval', 'by chance\n1 sd', 'predicted\nspeed', '\nlossless'),
  )
  lines = [
    [
      row.variant,
      f'{row.drafted:.2f}',
      f'{row.kept:.3f}',
      f'{row.tokens:.3f}',
      '-'.join(f'{x:.2f}' for x in row.tokens_ci95 or ()) or '-',
      f'{row.tokens_sd:.3f}',
      _speed(row),
      {True: 'yes', False: 'NO', None: ''}[row.lossless],
    ]
    for row in rows
  ]
  console.print(tables.Table(headings, lines))
  of_target, of_draft = trace_file.outside(trace)
  console.print(
    'probability without a column of its own, at most: '
    f'{of_target:.4f} of a distribution of the target, '
    f'{columns.number(of_draft, ".4f")} of a draft distribution',
  )
  print(f'\nreplay.json is in {out}')


def _speed(row):
  """Returns both bounds of the speed, or one number if they round to it."""
  least, most = (
    columns.number(x, '.2f', 'x') for x in (row.speed, row.most_speed)
  )
  return least if least == most else f'{row.speed:.2f}-{most}'
