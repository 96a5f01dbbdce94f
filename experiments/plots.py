"""The figure of an evaluation, as a PNG."""

from collections.abc import Sequence
import io
import math
import pathlib

import matplotlib.figure

from experiments import methods as methods_lib
from experiments import results

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
COLORS = (
  '#767676',
  '#0072B2',
  '#D55E00',
  '#009E73',
  '#CC79A7',
  '#E69F00',
  '#56B4E9',
)


def draw(
  path: pathlib.PurePath, rows: Sequence[results.Row], title: str
) -> None:
  """Draws tokens a round, speedup and acceptance of the overall rows."""
  figure = matplotlib.figure.Figure((11, 3.8), layout='constrained')
  tokens, speedup, acceptance = figure.subplots(1, 3)
  colors = {row.method: COLORS[i % len(COLORS)] for i, row in enumerate(rows)}
  _draw_tokens(tokens, rows, colors)
  _draw_speedup(speedup, rows, colors)
  _draw_acceptance(acceptance, rows, colors)
  for axes in (tokens, speedup, acceptance):
    axes.spines[['top', 'right']].set_visible(False)
  figure.suptitle(title, fontsize=10)
  image = io.BytesIO()
  figure.savefig(image, format='png', dpi=150)
  results.write(path, image.getvalue())


def _draw_tokens(axes, rows, colors):
  names = [row.method for row in rows]
  values = [row.tokens_per_round for row in rows]
  bars = axes.barh(names, values, color=[colors[name] for name in names])
  axes.bar_label(bars, fmt='%.2f', padding=3)
  axes.set(title='Tokens a round', xlim=(0, 1.18 * max(values)))
  axes.invert_yaxis()


def _draw_speedup(axes, rows, colors):
  rows = [row for row in rows if row.speedup is not None]
  axes.set_title('Speedup, with its 95% interval')
  if not rows:
    return
  names = [row.method for row in rows]
  values = [row.speedup for row in rows]
  bounds = [row.speedup_ci95 or [row.speedup] * 2 for row in rows]
  below = [v - low for v, (low, _) in zip(values, bounds, strict=True)]
  above = [high - v for v, (_, high) in zip(values, bounds, strict=True)]
  axes.barh(
    names,
    values,
    xerr=[[max(x, 0) for x in below], [max(x, 0) for x in above]],
    color=[colors[name] for name in names],
    error_kw={'capsize': 3, 'elinewidth': 1.2},
  )
  for i, (value, (_, high)) in enumerate(zip(values, bounds, strict=True)):
    label = axes.text(max(value, high) + 0.03, i, f'{value:.2f}x', va='center')
    # Readable across the line at 1.
    label.set_bbox({'facecolor': 'white', 'edgecolor': 'none', 'pad': 1})
  axes.set(xlim=(0, 1.25 * max(high for _, high in bounds)))
  axes.axvline(1, color='black', linewidth=0.8, linestyle=':')
  axes.invert_yaxis()


def _draw_acceptance(axes, rows, colors):
  axes.set(
    title='Acceptance by position',
    xlabel='position in the draft',
    ylim=(0, 1),
  )
  for row in rows:
    if row.method == methods_lib.BASELINE or not row.num_draft_tokens:
      continue
    shares = [math.nan if x is None else x for x in row.acceptance_by_position]
    positions = range(1, len(shares) + 1)
    axes.plot(
      positions, shares, 'o-', color=colors[row.method], label=row.method
    )
  axes.xaxis.get_major_locator().set_params(integer=True)
  if axes.lines:
    axes.legend(frameon=False)
