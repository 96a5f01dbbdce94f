"""The figures of a page besides the one in plots.py, one function each."""

from collections.abc import Mapping, Sequence
import math

from experiments import methods as methods_lib
from experiments.evaluation import plots
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib

_LEGEND = {'frameon': False, 'fontsize': 8}
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


def by_category(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws a panel per category, with a line and a mark per method."""
  methods = list(dict.fromkeys(row.method for row in rows))
  categories = list(dict.fromkeys(row.category for row in rows))
  num_lines = -(-len(categories) // _CATEGORIES_A_LINE)
  names = list(map(figures.label, methods))
  name_height = 0.06 + 0.14 * (1 + max(name.count('\n') for name in names))
  figure = figures.new(0.3 + (0.6 + name_height * len(methods)) * num_lines)
  looks = figures.looks([methods_lib.BASELINE, *methods])
  all_axes = figures.panels(figure, len(categories), _CATEGORIES_A_LINE)
  for axes, category in zip(all_axes, categories, strict=True):
    for row in rows:
      if row.category == category:
        place = methods.index(row.method)
        _speedup(axes, row, place, looks[row.method])
    axes.set_title(figures.label(category), fontsize=9)
    axes.set_yticks(range(len(methods)), names, fontsize=8)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.tick_params(labelbottom=True)
    axes.locator_params(axis='x', nbins=6)
    # Lines that lead from the names to the marks.
    axes.grid(axis='y', color=figures.ink(), alpha=0.15)
    plots.line_at_1(axes)
    figures.style(axes)
  figure.supxlabel(
    'speedup; the line at 1.0 is decoding without drafts', fontsize=10
  )
  return figure


def _speedup(axes, row, place, look):
  """Draws a mark with its interval."""
  value = row.speedup
  plots.whiskers(axes, [value], [row.speedup_ci95], [place], look.color)
  axes.plot(value, place, look.marker, color=look.color, markersize=5)


def roofline(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws a round's parts as stacked bars, and the share of the roofline."""
  figure = figures.new(1.4 + 0.32 * len(rows))
  parts, shares = figure.subplots(1, 2)
  places = range(len(rows))
  left = [0.0] * len(rows)
  for name, (label, color) in _PARTS.items():
    # A negative rest is noise.
    values = [max(getattr(row, name) or 0, 0) for row in rows]
    parts.barh(
      places,
      values,
      left=left,
      color=color,
      edgecolor=figures.paper(),
      label=label,
    )
    left = [x + value for x, value in zip(left, values, strict=True)]
  for place, row in enumerate(rows):
    if all(getattr(row, name) is None for name in _PARTS):
      # Otherwise it would look as if it took no time.
      parts.text(0, place, ' not known', va='center', fontsize=8)
  parts.set_xlim(left=0)
  if not any(left):
    parts.set_xticks([])
  parts.set_title('Milliseconds per round', fontsize=10)
  parts.set_yticks(places)
  names = [figures.label(row.method) for row in rows]
  parts.set_yticklabels(names, fontsize=8)
  parts.set_ylim(len(rows) - 0.4, -0.6)
  figure.legend(**_LEGEND, ncols=3, loc='outside lower left')
  values = [row.percent_of_roofline or 0 for row in rows]
  bars = shares.barh(
    places, values, color=figures.GREEN, edgecolor=figures.paper()
  )
  shares.bar_label(bars, fmt='%.0f%%', padding=3)
  shares.set_title('Share of the memory roofline', fontsize=10)
  shares.set_yticks([])
  shares.set(xlim=(0, max(100, 1.2 * max(values))))
  shares.set_ylim(len(rows) - 0.4, -0.6)
  for axes in (parts, shares):
    figures.style(axes)
  return figure


def cost(rows: Sequence[rows_lib.Row]) -> figures.Figure:
  """Draws tokens per round against the time of a round, a mark per method.

  The time is in tokens of the baseline: tokens per round divided by the
  speedup. Methods on a line through the origin have the same speedup.
  """
  figure = figures.new(max(3.6, 0.6 + 0.32 * len(rows)))
  axes = figure.subplots()
  looks = figures.looks([methods_lib.BASELINE, *(row.method for row in rows)])
  costs = [row.tokens_per_round / (row.speedup or math.nan) for row in rows]
  right = 1.15 * max(1.5, *costs)
  top = 1.15 * max(row.tokens_per_round for row in rows)
  for speedup in (0.5, 1, 1.5, 2, 3, 4, 6, 8):
    end = min(right, top / speedup)
    # A line that leaves the panel at once would only add its label.
    if end < right / 5:
      break
    axes.plot(
      *([0, end], [0, speedup * end]),
      '--' if speedup == 1 else ':',
      color=figures.ink(),
      linewidth=0.8,
      zorder=0,
    )
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
    look = looks[row.method]
    axes.plot(
      x,
      row.tokens_per_round,
      look.marker,
      color=look.color,
      markersize=8,
      label=figures.label(row.method),
    )
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
  """Draws the target's pass over n tokens, relative to one token.

  Args:
    by_name: for each hardware, milliseconds by number of tokens.
  """
  figure = figures.new(3.2 + 0.17 * len(by_name))
  axes = figure.subplots()
  looks = figures.looks(list(by_name))
  for name, t_ms in by_name.items():
    counts = sorted(map(int, t_ms))
    look = looks[name]
    axes.plot(
      counts,
      [t_ms[str(n)] / t_ms[str(counts[0])] for n in counts],
      look.dashes,
      marker=look.marker,
      color=look.color,
      label=f'{name}: t({counts[0]}) = {t_ms[str(counts[0])]:.3g} ms',
    )
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
  looks = figures.looks([methods_lib.BASELINE, *(row.method for row in rows)])
  for row in rows:
    look = looks[row.method]
    axes.plot(
      row.predicted_speedup,
      row.speedup,
      look.marker,
      color=look.color,
      label=figures.label(row.method),
    )
    if row.speedup_ci95:
      axes.vlines(row.predicted_speedup, *row.speedup_ci95, color=look.color)
  ends = [0.0, 1.08 * max(*axes.get_xlim(), *axes.get_ylim())]
  ink = figures.ink()
  axes.plot(ends, ends, ':', color=ink, linewidth=0.8, zorder=0)
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
  groups: dict[tuple, list[rows_lib.Row]] = {}
  for row in rows:
    if row.num_draft_tokens:
      key = row.drafter, row.verifier, row.law
      groups.setdefault(key, []).append(row)
  baseline = [row for row in rows if not row.num_draft_tokens]
  found = {}
  for key, group in groups.items():
    by_k = {row.num_draft_tokens: row for row in group}
    if len(by_k) == len(group) >= _LEAST_DRAFTS:
      # The baseline is the point K = 0 of every curve.
      points = baseline[:1] + [by_k[k] for k in sorted(by_k)]
      found[', '.join(key)] = points
  return found


def against_num_drafts(
  by_name: Mapping[str, list[rows_lib.Row]],
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
  for name, rows in by_name.items():
    drafts = [row.num_draft_tokens for row in rows]
    look = looks[name]
    line = {'color': look.color, 'marker': look.marker, 'label': name}
    line['linestyle'] = look.dashes
    seconds = [0.128 * (row.ms_per_token or math.nan) for row in rows]
    share = [
      row.tokens_per_round / (k + 1)
      for row, k in zip(rows, drafts, strict=True)
    ]
    per_round = [_round_ms(row) for row in rows]
    for axes, values in zip(all_axes, (seconds, share, per_round), strict=True):
      axes.plot(drafts, values, **line)
  titles = (
    *('Seconds for 128 tokens', 'Tokens per round / (K + 1)'),
    'Milliseconds per round',
  )
  for axes, title in zip(all_axes, titles, strict=True):
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
  figure.legend(
    *all_axes[0].get_legend_handles_labels(),
    **_LEGEND,
    ncols=2,
    loc='outside lower left',
  )
  return figure


def _round_ms(row: rows_lib.Row) -> float:
  """Returns the sum of a round's parts; NaN if a part was not timed."""
  times = [getattr(row, name) for name in _PARTS]
  return math.nan if None in times else sum(times)
