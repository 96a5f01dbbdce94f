"""Draws the speedups of a table as docs/speedups.svg.

    python docs/speedups.py RESULT_JSON TITLE > docs/speedups.svg

RESULT_JSON is the result.json of an `evaluate`. The picture has a row for each
method with drafts, the fastest first, and colours of its own for a light and a
dark page.
"""

from collections.abc import Sequence
import html
import json
import math
import pathlib
import sys
from typing import Any

Row = dict[str, Any]

_WIDTH, _ROW, _TOP, _BOTTOM = 760, 30, 84, 50
# The ends of the axis, in pixels.
_LEFT, _RIGHT = 150, 540
_TICK = 0.2
_BASELINE = 'autoregressive decoding'

_STYLE = """
  svg {
    --paper: #ffffff; --ink: #1b1b1f; --faint: #5f6068; --line: #d5d6dc;
    --faster: #0072b2; --slower: #c24f00;
    font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  }
  @media (prefers-color-scheme: dark) {
    svg {
      --paper: #16171b; --ink: #e7e7ea; --faint: #a2a4ad; --line: #3a3c45;
      --faster: #74bdf2; --slower: #ff9d5c;
    }
  }
  .paper { fill: var(--paper); stroke: var(--line); }
  text { fill: var(--ink); }
  .title { font-weight: 600; }
  .small { fill: var(--faint); font-size: 12px; }
  .mid { text-anchor: middle; }
  .end { text-anchor: end; }
  .grid { stroke: var(--line); }
  .plain { stroke: var(--ink); stroke-dasharray: 4 3; }
  .faster { fill: var(--faster); stroke: var(--faster); }
  .even { fill: var(--faint); stroke: var(--faint); }
  .slower { fill: var(--slower); stroke: var(--slower); }
  line { stroke-width: 1.5; }
"""


def draw(rows: Sequence[Row], title: str) -> str:
  """Returns the picture of the overall rows that have an interval."""
  shown = [
    row
    for row in rows
    if row['category'] == 'overall'
    and row['num_draft_tokens']
    and row['speedup_ci95']
  ]
  if not shown:
    raise ValueError('no row has drafts and an interval: decode more prompts')
  shown.sort(key=lambda row: -row['speedup'])
  ends = [end for row in shown for end in row['speedup_ci95']]
  first = math.floor(min([*ends, 1]) / _TICK)
  last = math.ceil(max([*ends, 1]) / _TICK)
  low, high = first * _TICK, last * _TICK
  x = lambda value: _LEFT + (value - low) / (high - low) * (_RIGHT - _LEFT)
  bottom = _TOP + _ROW * len(shown)
  height = bottom + _BOTTOM
  lines = [
    f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" '
    f'height="{height - 1}" rx="8"/>',
    _text(18, 32, title, 'title'),
    _text(18, 54, f'Speedup over {_BASELINE} and its 95% interval', 'small'),
    _text(_WIDTH - 18, 54, 'tokens per round', 'small end'),
  ]
  for tick in range(first, last + 1):
    place = x(tick * _TICK)
    lines += [
      _line(place, _TOP - 14, place, bottom, 'grid'),
      _text(place, bottom + 18, f'{tick * _TICK:.1f}x', 'small mid'),
    ]
  lines += [
    _line(x(1), _TOP - 14, x(1), bottom, 'plain'),
    _text(x(1), bottom + 36, _BASELINE, 'small mid'),
  ]
  for i, row in enumerate(shown):
    middle = _TOP + _ROW * i + 5
    begin, end = row['speedup_ci95']
    kind = 'faster' if begin > 1 else 'slower' if end < 1 else 'even'
    name = f'{row["method"]}, K = {row["num_draft_tokens"]}'
    lines += [
      _text(_LEFT - 12, middle + 5, name, 'end'),
      _line(x(begin), middle, x(end), middle, kind),
      f'<circle class="{kind}" cx="{x(row["speedup"]):.1f}" cy="{middle}" '
      'r="5"/>',
      _text(_RIGHT + 18, middle + 5, f'{row["speedup"]:.2f}x', 'title'),
      _text(_RIGHT + 70, middle + 5, _interval(row), 'small'),
      _text(_WIDTH - 18, middle + 5, f'{row["tokens_per_round"]:.2f}', 'end'),
    ]
  described = f'Speedups over {_BASELINE}: ' + '; '.join(
    f'{row["method"]} {row["speedup"]:.2f}x {_interval(row)}' for row in shown
  )
  return '\n'.join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
      f' width="{_WIDTH}" height="{height}" role="img" '
      'aria-labelledby="title desc">',
      f'<title id="title">{html.escape(title)}</title>',
      f'<desc id="desc">{html.escape(described)}.</desc>',
      f'<style>{_STYLE}</style>',
      *lines,
      '</svg>',
    ]
  )


def _interval(row: Row) -> str:
  begin, end = row['speedup_ci95']
  return f'({begin:.2f}-{end:.2f})'


def _text(x: float, y: float, text: str, kind: str) -> str:
  return f'<text class="{kind}" x="{x:.1f}" y="{y}">{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
  return (
    f'<line class="{kind}" x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"/>'
  )


def main(arguments: Sequence[str]) -> int:
  """Prints the picture; returns the exit code."""
  if len(arguments) != 2:
    print(__doc__)
    return 2
  rows = json.loads(pathlib.Path(arguments[0]).read_text())['rows']
  print(draw(rows, arguments[1]))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
