"""The figures of one set of rows: tokens per round, speedup, acceptance."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from experiments import methods as methods_lib
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib

_LEGEND = {'frameon': False, 'fontsize': 8}
_NAMES = {'fontsize': 9}
# Leaves room for the label of the line at 1.0.
_TITLE = {'fontsize': 10, 'pad': 16}
_BESIDE = {'xytext': (5, 0), 'textcoords': 'offset points', 'va': 'center'}


def overall(rows: Sequence[rows_lib.Row], title: str) -> figures.Figure:
  """Draws tokens per round and speedup side by side, acceptance below them."""
  second_lines = sum('\n' in figures.label(row.method) for row in rows)
  legend = 0.6 + 0.24 * len(rows) + 0.12 * second_lines
  heights = 1.1 + 0.36 * len(rows), max(2.6, legend)
  figure = figures.new(sum(heights), title)
  above, below = figure.subfigures(2, height_ratios=heights)
  left, right = above.subplots(1, 2)
  looks = figures.looks([row.method for row in rows])
  tokens_per_round(left, rows, looks)
  speedup(right, rows, looks)
  # The left panel's labels serve for both.
  right.set_yticklabels([])
  acceptance(below.subplots(), rows, looks)
  return figure


def tokens_per_round(
  axes: Any,
  rows: Sequence[rows_lib.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """Draws a bar per method."""
  values = [row.tokens_per_round for row in rows]
  bars = bars_of(axes, rows, values, looks)
  axes.bar_label(bars, fmt='%.2f', padding=3, fontsize=9)
  axes.set(xlim=(0, 1.2 * max(values)))
  axes.set_title('Tokens per round', **_TITLE)


def speedup(
  axes: Any,
  rows: Sequence[rows_lib.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """Draws a bar per method with its interval, and a line at 1.0."""
  axes.set_title('Speedup, with its 95% interval', **_TITLE)
  figures.style(axes)
  if all(row.speedup is None for row in rows):
    return
  # The place of a bar stays empty if there is no speedup.
  values = [row.speedup or 0 for row in rows]
  ends = [
    max(row.speedup_ci95 or [value])
    for row, value in zip(rows, values, strict=True)
  ]
  bars_of(axes, rows, values, looks)
  whiskers(axes, values, [row.speedup_ci95 for row in rows], range(len(rows)))
  # The numbers are in a column, right of all bars and of the line.
  most = max([1, *ends, *values])
  for i, row in enumerate(rows):
    if row.speedup is not None:
      axes.annotate(f'{row.speedup:.2f}x', (most, i), **_BESIDE, fontsize=9)
  axes.set(xlim=(0, 1.3 * most))
  line_at_1(axes)
  # Above the panel, where there are no bars.
  axes.figure.text(
    *(1, 1.01, 'line at 1.0: no drafts'),
    transform=axes.get_xaxis_transform(),
    ha='center',
    va='bottom',
    fontsize=8,
  )


def acceptance(
  axes: Any,
  rows: Sequence[rows_lib.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """Draws the share of drafts kept by position, with a line per method."""
  axes.set_title('Acceptance by position', fontsize=10)
  axes.set(
    xlabel='position in the draft',
    ylim=(0, 1),
  )
  figures.style(axes)
  for row in rows:
    if row.method == methods_lib.BASELINE or not row.num_draft_tokens:
      continue
    look = looks[row.method]
    shares = [math.nan if x is None else x for x in row.acceptance_by_position]
    axes.plot(
      range(1, len(shares) + 1),
      shares,
      look.dashes,
      marker=look.marker,
      color=look.color,
      label=figures.label(row.method),
    )
  figures.count_by_ones(axes.xaxis)
  if axes.lines:
    # Beside the lines, as there may be many of them.
    axes.figure.legend(**_LEGEND, loc='outside right upper')


def bars_of(
  axes: Any,
  rows: Sequence[rows_lib.Row],
  values: Sequence[float],
  looks: Mapping[str, figures.Look],
) -> Any:
  """Draws a horizontal bar per row, the first on top, and returns the bars."""
  places = range(len(rows))
  bars = axes.barh(
    places,
    values,
    color=[looks[row.method].color for row in rows],
    hatch=[looks[row.method].hatch for row in rows],
    edgecolor=figures.paper(),
  )
  names = [figures.label(row.method) for row in rows]
  axes.set_yticks(places, names, **_NAMES)
  axes.set_ylim(len(rows) - 0.4, -0.6)
  figures.style(axes)
  return bars


def whiskers(
  axes: Any,
  values: Sequence[float],
  intervals: Sequence[Sequence[float] | None],
  places: Sequence[float],
  color: str | None = None,
) -> None:
  """Draws the intervals of values horizontally; None draws nothing."""
  for value, interval, place in zip(values, intervals, places, strict=True):
    if interval is None:
      continue
    low, high = interval
    axes.errorbar(
      value,
      place,
      xerr=[[max(value - low, 0)], [max(high - value, 0)]],
      color=color or figures.ink(),
      capsize=2,
      linewidth=0.9,
      path_effects=figures.halo(),
    )


def line_at_1(axes: Any) -> None:
  """Draws the line at which a method is as fast as the baseline."""
  axes.axvline(
    1, color=figures.ink(), linewidth=0.9, linestyle='--', zorder=1.5
  )
