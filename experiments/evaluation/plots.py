"""The figures of an evaluation's rows and of timed passes, a function each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import math
from typing import Any

from experiments import methods as methods_lib
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib

_LEGEND = {'frameon': False, 'fontsize': 8}
# Leaves room for the label of the line at 1.0.
_TITLE = {'fontsize': 10, 'pad': 16}
_BESIDE = {'xytext': (5, 0), 'textcoords': 'offset points', 'va': 'center'}
_CATEGORIES_A_LINE = 2
# Lighter than the other two parts of a bar.
_LIGHT_GREY = '#C4C4C4'
# With fewer points there is no curve.
_LEAST_DRAFTS = 3
_PARTS = {
  'draft_ms': ('drafting', figures.ORANGE),
  'verify_ms': ("the target's pass", figures.BLUE),
  'overhead_ms': ('the rest', _LIGHT_GREY),
}


def of_rows(
  rows: Sequence[rows_lib.Row],
) -> Iterator[tuple[str, Callable[[], figures.Figure]]]:
  """Yields a caption and a function for each figure that a setting has."""
  overall = rows_lib.overall(rows)
  yield (
    'Tokens a round, speedup and acceptance over all prompts',
    functools.partial(summary, overall),
  )
  with_speedup = [
    row
    for row in rows
    if row.method != methods_lib.BASELINE and row.speedup is not None
  ]
  if rows_lib.are_several(row.category for row in with_speedup):
    yield (
      'Speedup by category, with 95% intervals',
      functools.partial(by_category, with_speedup),
    )
  if with_costs := [row for row in overall if row.speedup]:
    yield (
      'Tokens per round against the time of a round; lines join equal speedups',
      functools.partial(cost, with_costs),
    )
  yield (
    'A round: its parts, and how near the roofline it is',
    functools.partial(roofline, overall),
  )
  if with_prediction := [
    row
    for row in rows_lib.overall(with_speedup)
    if row.predicted_speedup is not None
  ]:
    yield (
      'Speedup as the parts of a round predict it, and as measured',
      functools.partial(predicted, with_prediction),
    )
  if by_drafter := curves(overall):
    yield (
      'Against the number of draft tokens K, as in Figure 1 of Chen et al., '
      '2302.01318',
      functools.partial(against_num_drafts, by_drafter),
    )


def summary(rows: Sequence[rows_lib.Row], title: str = '') -> figures.Figure:
  """Draws tokens per round and speedup side by side, acceptance below them."""
  second_lines = sum('\n' in figures.label(row.method) for row in rows)
  legend = 0.6 + 0.24 * len(rows) + 0.12 * second_lines
  heights = 1.1 + 0.36 * len(rows), max(2.6, legend)
  figure = figures.new(sum(heights), title)
  above, below = figure.subfigures(2, height_ratios=heights)
  left, right = above.subplots(1, 2)
  looks = _looks(rows)
  values = [row.tokens_per_round for row in rows]
  bars = _bars(left, rows, values, looks)
  left.bar_label(bars, fmt='%.2f', padding=3, fontsize=9)
  left.set(xlim=(0, 1.2 * max(values)))
  left.set_title('Tokens per round', **_TITLE)
  _speedups(right, rows, looks)
  # The left panel's labels serve for both.
  right.set_yticklabels([])
  _acceptance(below.subplots(), rows, looks)
  return figure


def _speedups(axes, rows, looks):
  """Draws a bar per method with its interval, and a line at 1.0."""
  axes.set_title('Speedup, with its 95% interval', **_TITLE)
  figures.style(axes)
  if all(row.speedup is None for row in rows):
    return
  # The place of a bar stays empty if there is no speedup.
  values = [row.speedup or 0 for row in rows]
  _bars(axes, rows, values, looks)
  for i, (row, value) in enumerate(zip(rows, values, strict=True)):
    _whiskers(axes, value, row.speedup_ci95, i, figures.ink())
  # The numbers are in a column, right of all bars and of the line.
  most = max([1, *values, *(max(row.speedup_ci95 or [0]) for row in rows)])
  for i, row in enumerate(rows):
    if row.speedup is not None:
      axes.annotate(f'{row.speedup:.2f}x', (most, i), **_BESIDE, fontsize=9)
  axes.set(xlim=(0, 1.3 * most))
  _line_at_1(axes)
  # Above the panel, where there are no bars.
  axes.figure.text(
    1,
    1.01,
    'line at 1.0: no drafts',
    transform=axes.get_xaxis_transform(),
    ha='center',
    va='bottom',
    fontsize=8,
  )


def _acceptance(axes, rows, looks):
  """Draws the share of drafts kept by position, with a line per method."""
  axes.set_title('Acceptance by position', fontsize=10)
  axes.set(xlabel='position in the draft', ylim=(0, 1))
  figures.style(axes)
  for row in rows:
    if row.method == methods_lib.BASELINE or not row.num_draft_tokens:
      continue
    shares = [math.nan if x is None else x for x in row.acceptance_by_position]
    positions = range(1, len(shares) + 1)
    name = figures.label(row.method)
    axes.plot(positions, shares, **looks[row.method].line, label=name)
  figures.count_by_ones(axes.xaxis)
  if axes.lines:
    # Beside the lines, as there may be many of them.
    axes.figure.legend(**_LEGEND, loc='outside right upper')


def by_category(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws a panel per category, with a line and a mark per method."""
  methods = list(dict.fromkeys(row.method for row in rows))
  categories = list(dict.fromkeys(row.category for row in rows))
  num_lines = -(-len(categories) // _CATEGORIES_A_LINE)
  names = list(map(figures.label, methods))
  name_height = 0.06 + 0.14 * (1 + max(name.count('\n') for name in names))
  figure = figures.new(0.3 + (0.6 + name_height * len(methods)) * num_lines)
  looks = _looks(rows)
  all_axes = figures.panels(figure, len(categories), _CATEGORIES_A_LINE)
  for axes, category in zip(all_axes, categories, strict=True):
    for row in rows:
      if row.category == category:
        place, look = methods.index(row.method), looks[row.method]
        _whiskers(axes, row.speedup, row.speedup_ci95, place, look.color)
        axes.plot(row.speedup, place, **look.mark, markersize=5)
    axes.set_title(figures.label(category), fontsize=9)
    axes.set_yticks(range(len(methods)), names, fontsize=8)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.tick_params(labelbottom=True)
    axes.locator_params(axis='x', nbins=6)
    # Lines that lead from the names to the marks.
    axes.grid(axis='y', color=figures.ink(), alpha=0.15)
    _line_at_1(axes)
    figures.style(axes)
  figure.supxlabel(
    'speedup; the line at 1.0 is decoding without drafts', fontsize=10
  )
  return figure


def roofline(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws a round's parts as stacked bars, and the share of the roofline."""
  figure = figures.new(1.4 + 0.32 * len(rows))
  parts, shares = figure.subplots(1, 2)
  places = range(len(rows))
  left = [0.0] * len(rows)
  edges = {'edgecolor': figures.paper()}
  for name, (label, color) in _PARTS.items():
    # A negative rest is noise.
    values = [max(getattr(row, name) or 0, 0) for row in rows]
    parts.barh(places, values, left=left, color=color, label=label, **edges)
    left = [x + value for x, value in zip(left, values, strict=True)]
  for place, row in enumerate(rows):
    if all(getattr(row, name) is None for name in _PARTS):
      # Otherwise it would look as if it took no time.
      parts.text(0, place, ' not known', va='center', fontsize=8)
  parts.set_xlim(left=0)
  if not any(left):
    parts.set_xticks([])
  parts.set_title('Milliseconds per round', fontsize=10)
  names = [figures.label(row.method) for row in rows]
  parts.set_yticks(places, names, fontsize=8)
  figure.legend(**_LEGEND, ncols=3, loc='outside lower left')
  values = [row.percent_of_roofline or 0 for row in rows]
  bars = shares.barh(places, values, color=figures.GREEN, **edges)
  shares.bar_label(bars, fmt='%.0f%%', padding=3)
  shares.set_title('Share of the memory roofline', fontsize=10)
  shares.set_yticks([])
  shares.set(xlim=(0, max(100, 1.2 * max(values))))
  for axes in (parts, shares):
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figures.style(axes)
  return figure


def cost(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws tokens per round against the time of a round, a mark per method.

  The time is in tokens of the baseline: tokens per round divided by the
  speedup. Methods on a line through the origin have the same speedup.
  """
  figure = figures.new(max(3.6, 0.6 + 0.32 * len(rows)))
  axes = figure.subplots()
  looks = _looks(rows)
  costs = [row.tokens_per_round / (row.speedup or math.nan) for row in rows]
  right = 1.15 * max(1.5, *costs)
  top = 1.15 * max(row.tokens_per_round for row in rows)
  for speedup in (0.5, 1, 1.5, 2, 3, 4, 6, 8):
    end = min(right, top / speedup)
    # A line that leaves the panel at once would only add its label.
    if end < right / 5:
      break
    line = {'linestyle': '--' if speedup == 1 else ':', 'linewidth': 0.8}
    ends = [0, end], [0, speedup * end]
    axes.plot(*ends, **line, color=figures.ink(), zorder=0)
    is_at_top = end < right
    axes.annotate(
      f'{speedup:g}x',
      (end, speedup * end),
      xytext=(0, 2) if is_at_top else (3, 0),
      textcoords='offset points',
      ha='center' if is_at_top else 'left',
      va='bottom' if is_at_top else 'center',
      fontsize=8,
    )
  for row, x in zip(rows, costs, strict=True):
    look, name = looks[row.method], figures.label(row.method)
    axes.plot(x, row.tokens_per_round, **look.mark, markersize=8, label=name)
  axes.set(
    xlabel="time of a round, in the baseline's time per token",
    ylabel='tokens per round',
    xlim=(0, right),
    ylim=(0, top),
  )
  figures.style(axes)
  figure.legend(**_LEGEND, loc='outside right upper')
  return figure


def pass_times(by_name: Mapping[str, Mapping[str, float]]) -> figures.Figure:
  """Draws the target's pass over n tokens, relative to the smallest n.

  `by_name` has, for each hardware, milliseconds by number of tokens.
  """
  figure = figures.new(3.2 + 0.17 * len(by_name))
  axes = figure.subplots()
  looks = figures.looks(list(by_name))
  for name, t_ms in by_name.items():
    counts = sorted(map(int, t_ms))
    base = t_ms[str(counts[0])]
    ratios = [t_ms[str(n)] / base for n in counts]
    label = f'{name}: t({counts[0]}) = {base:.3g} ms'
    axes.plot(counts, ratios, **looks[name].line, label=label)
  axes.set(
    xlabel='tokens n of a pass',
    ylabel='t(n), relative to the smallest n',
    ylim=(0, 1.08 * axes.dataLim.ymax),
  )
  figures.count_by_ones(axes.xaxis)
  axes.axhline(1, color=figures.ink(), linewidth=0.8, linestyle=':')
  figures.style(axes)
  figure.legend(**_LEGEND, loc='outside lower left')
  return figure


def predicted(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws a mark per method, on the diagonal if the prediction is right."""
  figure = figures.new(max(4, 0.6 + 0.32 * len(rows)))
  axes = figure.subplots()
  looks = _looks(rows)
  for row in rows:
    look, name = looks[row.method], figures.label(row.method)
    axes.plot(row.predicted_speedup, row.speedup, **look.mark, label=name)
    if row.speedup_ci95:
      axes.vlines(row.predicted_speedup, *row.speedup_ci95, color=look.color)
  ends = [0.0, 1.08 * max(*axes.get_xlim(), *axes.get_ylim())]
  axes.plot(ends, ends, ':', color=figures.ink(), linewidth=0.8, zorder=0)
  low, high = ([share * x for x in ends] for share in (0.9, 1.1))
  axes.fill_between(
    ends, low, high, color=figures.GREY, alpha=0.2, label='within 10%'
  )
  start = 0.9 * min(
    min(row.predicted_speedup, row.speedup, *row.speedup_ci95 or ())
    for row in rows
  )
  axes.set(
    xlabel='predicted speedup',
    ylabel='measured speedup, with its 95% interval',
    xlim=(start, ends[1]),
    ylim=(start, ends[1]),
  )
  figures.style(axes)
  axes.legend(**_LEGEND, loc='upper left', bbox_to_anchor=(1, 1))
  return figure


def curves(rows: Sequence[rows_lib.Row]) -> dict[str, list[rows_lib.Row]]:
  """Returns each curve's rows by K, without curves of too few points."""
  groups: dict[str, list[rows_lib.Row]] = {}
  for row in sorted(rows, key=lambda row: row.num_draft_tokens):
    if row.num_draft_tokens:
      name = f'{row.drafter}, {row.verifier}, {row.law}'
      groups.setdefault(name, []).append(row)
  # The baseline is the point K = 0 of every curve.
  baseline = [row for row in rows if not row.num_draft_tokens][:1]
  return {
    name: baseline + group
    for name, group in groups.items()
    if len({row.num_draft_tokens for row in group}) == len(group)
    if len(group) >= _LEAST_DRAFTS
  }


def against_num_drafts(
  by_name: Mapping[str, Sequence[rows_lib.Row]],
) -> figures.Figure:
  """Draws decoding time, tokens per round and time per round against K.

  Decoding time is that of 128 tokens. A round has K drafts and one token of the
  target's own, so tokens per round are divided by K + 1, the most that a round
  emits. The time of a round is the sum of its parts, without the prefill; there
  is no point if a part was not timed.
  """
  figure = figures.new(2.8 + 0.12 * len(by_name))
  all_axes = figure.subplots(1, 3)
  looks = figures.looks([methods_lib.BASELINE, *by_name])
  measures: dict[str, Callable[[rows_lib.Row], float]] = {
    'Seconds for 128 tokens': lambda row: (
      0.128 * (row.ms_per_token or math.nan)
    ),
    'Tokens per round / (K + 1)': lambda row: (
      row.tokens_per_round / (row.num_draft_tokens + 1)
    ),
    'Milliseconds per round': _round_ms,
  }
  for axes, (title, measure) in zip(all_axes, measures.items(), strict=True):
    for name, rows in by_name.items():
      drafts = [row.num_draft_tokens for row in rows]
      values = list(map(measure, rows))
      axes.plot(drafts, values, **looks[name].line, label=name)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel('draft tokens K', fontsize=9)
    # Without a point there is no largest value.
    if math.isfinite(axes.dataLim.ymax):
      axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
      figures.count_by_ones(axes.xaxis)
    else:
      axes.set(xticks=[], yticks=[])
      axes.text(0.5, 0.5, 'not measured', ha='center', transform=axes.transAxes)
    figures.style(axes)
  marks = all_axes[0].get_legend_handles_labels()
  figure.legend(*marks, **_LEGEND, ncols=2, loc='outside lower left')
  return figure


def _round_ms(row: rows_lib.Row) -> float:
  """Returns the sum of a round's parts; NaN if a part was not timed."""
  times = [getattr(row, name) for name in _PARTS]
  return math.nan if None in times else sum(times)


def _looks(rows: Sequence[rows_lib.Row]) -> dict[str, figures.Look]:
  """Returns the looks of methods, which are the same in all figures."""
  return figures.looks([methods_lib.BASELINE, *(row.method for row in rows)])


def _bars(axes, rows, values, looks) -> Any:
  """Draws a horizontal bar per row, the first on top, and returns the bars."""
  bars = axes.barh(
    range(len(rows)),
    values,
    color=[looks[row.method].color for row in rows],
    hatch=[looks[row.method].hatch for row in rows],
    edgecolor=figures.paper(),
  )
  names = [figures.label(row.method) for row in rows]
  axes.set_yticks(range(len(rows)), names, fontsize=9)
  axes.set_ylim(len(rows) - 0.4, -0.6)
  figures.style(axes)
  return bars


def _whiskers(axes, value, interval, place, color):
  """Draws the interval of a value horizontally, if there is one."""
  if interval is None:
    return
  low, high = interval
  axes.errorbar(
    value,
    place,
    xerr=[[max(value - low, 0)], [max(high - value, 0)]],
    color=color,
    capsize=2,
    linewidth=0.9,
    path_effects=figures.halo(),
  )


def _line_at_1(axes):
  """Draws the line at which a method is as fast as the baseline."""
  ink = figures.ink()
  axes.axvline(1, color=ink, linewidth=0.9, linestyle='--', zorder=1.5)
