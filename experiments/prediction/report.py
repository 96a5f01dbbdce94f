"""The report on a prediction: a table in the terminal, files and a figure."""

from collections.abc import Sequence
import dataclasses
import itertools
import pathlib

import gin

from experiments.command import environment
from experiments.prediction import paper_table
from experiments.prediction import prediction
from experiments.reporting import columns
from experiments.reporting import figures
from experiments.reporting import files
from experiments.reporting import result_file
from experiments.reporting import tables
from specsample.cost import chips

_PANELS_A_LINE = 2


def write(
  out: pathlib.PurePath,
  rows: Sequence[prediction.Row],
  table: Sequence[paper_table.Row],
) -> None:
  """Writes predict.json, predict.csv and predict.png."""
  record = environment.describe() | {
    'predicted': True,  # no speedup was measured
    'gin_config': gin.operative_config_str(),
    'rows': [dataclasses.asdict(row) for row in rows],
    'compiled_table': [dataclasses.asdict(row) for row in table],
  }
  result_file.write(out / 'predict.json', record)
  files.write_csv(out / 'predict.csv', rows)
  figures.write_png(out / 'predict.png', lambda: _figure(rows))


def show(
  out: pathlib.PurePath,
  rows: Sequence[prediction.Row],
  table: Sequence[paper_table.Row],
) -> None:
  """Prints the best K of each setting, and the paper's table."""
  console = tables.console()
  console.print(f'\n{_title(rows[0])}', style='bold')
  console.print(f'target: {rows[0].target}\ndrafter: {rows[0].draft}\n')
  console.print(_best(rows))
  if any(row.fits is False for row in rows):
    console.print('! does not fit into the memory of the devices')
  if any(row.speedup <= 1 for row in prediction.best(rows)):
    console.print('- no K gives a speedup; the best result is in brackets')
  if table:
    of_settings = itertools.groupby(table, paper_table.setting)
    for _, rows_of_setting in of_settings:
      console.print(_of_paper(list(rows_of_setting)))
    console.print(
      'roofline: products, bytes and messages of the compiled programs alone; '
      'with waits: each collective\nwaits so long that autoregressive decoding '
      "takes the paper's time (fitted to that number)"
    )
  names = figures.written('predict.json', 'predict.csv', 'predict.png')
  print(f'\n{names} are in {out}')


def _title(row):
  return f'Predicted speedup, {_where(row)}: at the best K, by the acceptance'


def _where(row):
  if row.devices is None:
    return row.chip
  known = chips.CHIPS.get(row.chip)
  per_chip = 1 if known is None else known.devices_per_chip
  of_chips = f' ({per_chip} devices per chip)' if per_chip > 1 else ''
  return f'{row.devices} x {row.chip}{of_chips}'


def _best(rows) -> tables.Table:
  acceptances = dict.fromkeys(row.acceptance for row in rows)
  headings = (
    *('batch', 'context', 'without drafts\nms per token', '\nbound by'),
    *(f'{acceptance:g}' for acceptance in acceptances),
  )
  lines: dict[tuple[int, int], list[prediction.Row]] = {}
  for row in prediction.best(rows):
    lines.setdefault((row.batch_size, row.context), []).append(row)
  cells = [
    [
      str(batch),
      str(context),
      f'{line[0].pass_ms:.2f}' + '!' * (line[0].fits is False),
      line[0].pass_bound or '-',
      *map(_speedup, line),
    ]
    for (batch, context), line in lines.items()
  ]
  return tables.Table(headings, cells)


def _speedup(row: prediction.Row) -> str:
  best = f'{row.speedup:.2f}x'
  return (
    f'{best} (K {row.num_draft_tokens})' if row.speedup > 1 else f'- ({best})'
  )


def _of_paper(rows) -> tables.Table:
  headings = (
    f'{rows[0].topology}, batch {rows[0].batch_size}\nPREDICTED',
    'tokens\nper round',
    'paper\nms per token',
    '\nspeedup',
    'roofline\nms per token',
    '\nspeedup',
    'with waits\nms per token',
    '\nspeedup',
  )
  lines = [
    [
      row.benchmark,
      f'{row.tokens_per_round:.2f}',
      f'{row.printed_plain_ms:.2f} / {row.printed_ms:.2f}',
      f'{row.printed_speedup:.2f}x',
      f'{row.plain_ms:.2f} / {row.ms:.2f}',
      f'{row.speedup:.2f}x',
      f'{row.printed_plain_ms:.2f} / {columns.number(row.fitted_ms, ".2f")}',
      columns.number(row.fitted_speedup, '.2f', 'x'),
    ]
    for row in rows
  ]
  return tables.Table(headings, lines)


def _figure(rows) -> figures.Figure:
  """Draws speedup over K at the first context, a panel per batch size."""
  batches = list(dict.fromkeys(row.batch_size for row in rows))
  acceptances = list(dict.fromkeys(row.acceptance for row in rows))
  looks = figures.looks([f'{acceptance:g}' for acceptance in acceptances])
  context = rows[0].context
  num_lines = -(-len(batches) // _PANELS_A_LINE)
  figure = figures.new(
    0.8 + 2.2 * num_lines,
    f'{_where(rows[0])}, {context} tokens of context: predicted, not measured',
  )
  panels = figures.panels(figure, len(batches), _PANELS_A_LINE)
  for axes, batch in zip(panels, batches, strict=True):
    for acceptance in acceptances:
      of_line = [
        row
        for row in rows
        if (row.batch_size, row.context, row.acceptance)
        == (batch, context, acceptance)
      ]
      axes.plot(
        [row.num_draft_tokens for row in of_line],
        [row.speedup for row in of_line],
        color=looks[f'{acceptance:g}'].color,
        marker=looks[f'{acceptance:g}'].marker,
        markersize=4,
        label=f'{acceptance:g}',
      )
    axes.axhline(1, color=figures.ink(), linewidth=0.8, linestyle=':')
    axes.set_title(f'batch {batch}', fontsize=10)
    axes.tick_params(labelbottom=True)
    figures.count_by_ones(axes.xaxis)
    figures.style(axes)
  panels[0].set_ylim(bottom=0)
  figure.supxlabel('K, draft tokens per round', fontsize=9)
  figure.supylabel('predicted speedup', fontsize=9)
  figure.legend(
    *panels[0].get_legend_handles_labels(),
    title='acceptance',
    frameon=False,
    loc='outside right upper',
  )
  return figure
