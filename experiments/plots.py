"""The figures of one set of rows: tokens a round, speedup, acceptance."""

from collections.abc import Mapping, Sequence
import functools
import math
import pathlib
from typing import Any

from experiments import figures
from experiments import methods as methods_lib
from experiments import results

_LEGEND = {'frameon': False, 'fontsize': 8}
_NAMES = {'fontsize': 8}
_BESIDE = {'xytext': (5, 0), 'textcoords': 'offset points', 'va': 'center'}


def draw(
  path: pathlib.PurePath, rows: Sequence[results.Row], title: str
) -> None:
  """Writes the figure of the overall rows as a PNG."""
  figures.write_png(path, functools.partial(overall, rows, title))


def overall(rows: Sequence[results.Row], title: str) -> figures.Figure:
  """Tokens a round, speedup and acceptance, side by side."""
  figure = figures.new(11, max(3.8, 0.9 + 0.32 * len(rows)))
  axes = figure.subplots(1, 3)
  looks = figures.looks([row.method for row in rows])
  tokens_per_round(axes[0], rows, looks)
  speedup(axes[1], rows, looks)
  # Beside those of the first panel.
  axes[1].set_yticklabels([])
  acceptance(axes[2], rows, looks)
  figure.suptitle(title, fontsize=10)
  return figure


def tokens_per_round(
  axes: Any,
  rows: Sequence[results.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """A bar a method."""
  values = [row.tokens_per_round for row in rows]
  bars = bars_of(axes, rows, values, looks)
  axes.bar_label(bars, fmt='%.2f', padding=3)
  axes.set(title='Tokens a round', xlim=(0, 1.18 * max(values)))


def speedup(
  axes: Any,
  rows: Sequence[results.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """A bar a method with its interval, and a line at 1."""
  axes.set_title('Speedup, with its 95% interval')
  figures.style(axes)
  if all(row.speedup is None for row in rows):
    return
  # Where there is none the place of the bar is empty.
  values = [row.speedup or 0 for row in rows]
  ends = [
    max(row.speedup_ci95 or [value])
    for row, value in zip(rows, values, strict=True)
  ]
  bars_of(axes, rows, values, looks)
  whiskers(axes, values, [row.speedup_ci95 for row in rows], range(len(rows)))
  # Above the line of the baseline, which may go through it.
  behind = {'facecolor': figures.paper(), 'edgecolor': 'none', 'pad': 1}
  for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
    if row.speedup is not None:
      axes.annotate(
        f'{row.speedup:.2f}x',
        (max(row.speedup, end), i),
        **_BESIDE,
        bbox=behind,
      )
  axes.set(xlim=(0, 1.25 * max([*ends, *values])))
  line_at_1(axes)


def acceptance(
  axes: Any,
  rows: Sequence[results.Row],
  looks: Mapping[str, figures.Look],
) -> None:
  """The share of drafts kept, a line a method over the position."""
  axes.set(
    title='Acceptance by position',
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
    # Beside the lines, of which there may be many.
    axes.legend(**_LEGEND, loc='upper left', bbox_to_anchor=(1, 1))


def bars_of(
  axes: Any,
  rows: Sequence[results.Row],
  values: Sequence[float],
  looks: Mapping[str, figures.Look],
) -> Any:
  """A horizontal bar a row, the first on top; returns the bars."""
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
  """The intervals of values, horizontal; nothing where there is none."""
  for value, interval, place in zip(values, intervals, places, strict=True):
    if interval is None:
      continue
    low, high = interval
    axes.errorbar(
      value,
      place,
      xerr=[[max(value - low, 0)], [max(high - value, 0)]],
      color=color or figures.ink(),
      capsize=3,
      linewidth=1.2,
    )


def line_at_1(axes: Any) -> None:
  """Where a method is as fast as the baseline."""
  axes.axvline(1, color=figures.ink(), linewidth=0.8, linestyle=':', zorder=0)
