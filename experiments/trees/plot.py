"""The figure of an ablation of trees, as a PNG."""

from collections.abc import Sequence
import functools
import pathlib

from experiments.reporting import figures
from experiments.trees import comparison
from experiments.trees import rows as rows_lib

_STAR = {'marker': '*', 's': 190, 'edgecolors': 'black', 'linewidths': 0.8}


def draw(
  path: pathlib.PurePath, rows: Sequence[rows_lib.TreeRow], title: str
) -> None:
  """Draws tokens per round, milliseconds per round and speedup against N.

  A line per drafter joins its best trees; the other trees are marks.
  """
  figures.write_png(path, functools.partial(_figure, rows, title))


def _figure(rows, title):
  figure = figures.new(8, title)
  tokens, times, speedups = figure.subplots(3, 1)
  drafters = list(dict.fromkeys(row.drafter for row in rows))
  for i, drafter in enumerate(drafters):
    of_drafter = [row for row in rows if row.drafter == drafter]
    color = figures.COLORS[1 + i % (len(figures.COLORS) - 1)]
    _draw(tokens, of_drafter, 'tokens_per_round', color)
    _draw(times, of_drafter, 'round_ms', color)
    _draw(speedups, of_drafter, 'speedup', color)
  tokens.set_title('Tokens per round')
  times.set_title('Milliseconds per round')
  speedups.set_title('Speedup')
  speedups.axhline(1, color=figures.ink(), linewidth=0.8, linestyle=':')
  for axes in (tokens, times, speedups):
    axes.set(xlabel='nodes of the tree (N)', xscale='log')
    axes.set_xticks(*_ticks([row.num_nodes for row in rows]))
    axes.minorticks_off()
    figures.style(axes)
  times.set_ylim(bottom=0)
  _legend(figure, tokens)
  return figure


def _draw(axes, rows, name, color):
  best = sorted(
    (row for row in rows if row.topology.startswith('best')),
    key=lambda row: row.num_nodes,
  )
  axes.plot(
    [row.num_nodes for row in best],
    [getattr(row, name) for row in best],
    'o-',
    color=color,
    markersize=4,
    label=rows[0].drafter,
  )
  for row in rows:
    at = [row.num_nodes], [getattr(row, name)]
    if not row.topology.startswith('best'):
      axes.scatter(*at, color=color, marker=_marker(row), s=40, zorder=3)
    if row.is_chosen:
      axes.scatter(*at, color=color, zorder=4, **_STAR)


_MARKERS = {
  comparison.CHAIN: 's',
  comparison.FIXED: '^',
  comparison.CHOSEN: 'o',
}


def _marker(row):
  return _MARKERS.get(row.topology, 'D')


def _ticks(sizes):
  """Returns ticks and labels: the powers of two around the sizes."""
  powers = [1 << i for i in range(max(sizes).bit_length() + 1)]
  shown = [size for size in powers if min(sizes) / 2 < size < 2 * max(sizes)]
  return shown, [str(size) for size in shown]


def _legend(figure, axes):
  marks = {'chain': 's', 'dynamic tree': 'D', "Medusa's tree": '^'}
  gray = figures.COLORS[0]
  extra = [
    axes.scatter([], [], color=gray, marker=marker, s=40, label=label)
    for label, marker in marks.items()
  ]
  extra.append(axes.scatter([], [], color=gray, label='chosen', **_STAR))
  handles = [*axes.lines, *extra]
  figure.legend(
    handles=handles,
    loc='outside lower center',
    ncols=4,
    frameon=False,
    fontsize=8,
  )
