"""Figures by method stay readable with many methods."""

import dataclasses
import itertools

from matplotlib.backends import backend_agg
import pytest

from experiments import methods
from experiments.evaluation import plots
from experiments.reporting import figures
from experiments.reporting import rows as rows_lib
from tests.experiments import reports

_CATEGORIES = ('overall', 'math', 'qa', 'summarization', reports.NASTY)
_COUNTS = (1, 9, 14)
_T_MS = {'1': 12.5, '2': 15.0, '17': 37.5}


def _rows(count, categories=_CATEGORIES):
  """Returns rows of a baseline and `count` methods with long names."""
  names = [methods.BASELINE]
  names += [f'a method of {i} words or more of them' for i in range(count)]
  return [
    rows_lib.Row(
      **reports.row(
        name,
        category,
        num_drafts,
        speedup=1 + i / 10,
        speedup_ci95=[0.9 + i / 10, 1.1 + i / 10] if i else None,
        predicted_speedup=1 + i / 9,
        overhead_ms=1.0,
        acceptance_by_position=[0.9**j for j in range(num_drafts)],
      )
    )
    for category in categories
    for i, name in enumerate(names)
    for num_drafts in [min(i, 7)]
  ]


def _overall(count):
  return plots.summary(_rows(count, ['overall']), 'title')


def _against_num_drafts(count):
  rows = _rows(4, ['overall'])
  names = [f'a drafter of {i} words, chain, sampled' for i in range(count)]
  return plots.against_num_drafts(dict.fromkeys(names, rows))


def _of_drafting(draw, categories):
  return lambda count: draw(
    [row for row in _rows(count, categories) if row.method != methods.BASELINE]
  )


_FIGURES = {
  'overall': _overall,
  'by category': _of_drafting(plots.by_category, _CATEGORIES),
  'roofline': lambda count: plots.roofline(_rows(count, ['overall'])),
  'cost': lambda count: plots.cost(_rows(count, ['overall'])),
  'passes': lambda count: plots.pass_times(
    {f'a machine of {i} words, with its run': _T_MS for i in range(count)}
  ),
  'predicted': _of_drafting(plots.predicted, ['overall']),
  'against K': _against_num_drafts,
}


def _boxes(figure):
  """Returns the extents of panels, axis names and legends, as drawn."""
  canvas = backend_agg.FigureCanvasAgg(figure)
  canvas.draw()
  extents = lambda found: [
    one.get_window_extent(canvas.get_renderer()) for one in found
  ]
  axes = [one for one in figure.axes if one.axison]
  legends = [one.get_legend() for one in axes] + figure.legends
  names = [
    label
    for one in axes
    for label in one.get_yticklabels()
    if label.get_visible() and label.get_text() and _is_in_view(one, label)
  ]
  return extents(axes), extents(names), extents(filter(None, legends))


def _is_in_view(axes, label):
  """Returns whether a label lies within the axis, and so is drawn."""
  low, high = sorted(axes.get_ylim())
  return low <= label.get_position()[1] <= high


@pytest.mark.slow
@pytest.mark.parametrize('count', _COUNTS)
@pytest.mark.parametrize('name', _FIGURES)
def test_nothing_is_squeezed_or_covered(name, count):
  figure = _FIGURES[name](count)
  panels, names, legends = _boxes(figure)
  for panel in panels:
    assert panel.width > 1.5 * figure.dpi
    assert panel.height > figure.dpi / 3
  for one, other in itertools.combinations([*panels, *names, *legends], 2):
    assert not one.overlaps(other)
  for box in (*panels, *names, *legends):
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert box.y0 >= 0 and box.y1 <= figure.bbox.y1


@pytest.mark.parametrize('count', _COUNTS)
def test_panel_of_each_category_has_a_mark_per_method(count):
  rows = _rows(count)[1 : count + 1]
  with_gap = [*rows, dataclasses.replace(rows[-1], category='qa', speedup=3.5)]
  overall, qa = plots.by_category(with_gap).axes
  places = range(count)
  labels = [label.get_text() for label in overall.get_yticklabels()]
  assert labels == [figures.label(row.method) for row in rows]
  assert _marks(overall) == [
    (row.speedup, place) for row, place in zip(rows, places, strict=True)
  ]
  # Values that other methods lack don't move a mark.
  assert _marks(qa) == [(3.5, count - 1)]


def _marks(axes):
  return [
    tuple(line.get_xydata()[0])
    for line in axes.lines
    if line.get_marker() in figures.MARKERS
  ]


def test_mark_is_on_the_line_of_its_speedup():
  rows = [
    dataclasses.replace(row, tokens_per_round=tokens, speedup=speedup)
    for row, tokens, speedup in zip(
      _rows(2, ['overall']), (1.0, 3.0, 2.0), (1.0, 1.5, 0.5), strict=True
    )
  ]
  (axes,) = plots.cost(rows).axes
  assert _marks(axes) == [(1, 1), (2, 3), (4, 2)]
  for text in axes.texts:
    x, y = text.xy
    assert y / x == pytest.approx(float(text.get_text()[:-1]))
  assert '1x' in [text.get_text() for text in axes.texts]


def test_passes_are_relative_to_one_token():
  (axes,) = plots.pass_times({'a': _T_MS}).axes
  line, *_ = axes.lines
  assert line.get_xydata().tolist() == [[1, 1], [2, 1.2], [17, 3]]
  assert line.get_label() == 'a: t(1) = 12.5 ms'


def test_interval_is_not_cut():
  row = dataclasses.replace(
    _rows(1, ['overall'])[1],
    speedup=1.0,
    speedup_ci95=[0.5, 1.6],
    predicted_speedup=1.0,
  )
  (axes,) = plots.predicted([row]).axes
  low, high = axes.get_ylim()
  assert low < 0.5 and high > 1.6


def test_rounds_without_a_time_are_not_drawn_as_none():
  rows = _rows(2, ['overall'])
  unknown = dict.fromkeys(('draft_ms', 'verify_ms', 'overhead_ms'))
  parts, _ = plots.roofline(
    [rows[0], dataclasses.replace(rows[1], **unknown)]
  ).axes
  (text,) = parts.texts
  assert text.get_position() == (0, 1)
  assert text.get_text() == ' not known'
  parts, _ = plots.roofline([dataclasses.replace(rows[0], **unknown)]).axes
  assert not list(parts.get_xticks())


def test_many_methods_look_different():
  looks = figures.looks([str(i) for i in range(24)])
  for one, other in itertools.combinations(looks.values(), 2):
    # Colours are lost in print.
    assert (one.color, one.marker) != (other.color, other.marker)
    assert (one.marker, one.dashes) != (other.marker, other.dashes)
    assert (one.color, one.hatch) != (other.color, other.hatch)


def test_method_without_a_speedup_keeps_its_place():
  rows = _rows(3, ['overall'])
  rows[1] = dataclasses.replace(rows[1], speedup=None, speedup_ci95=None)
  figure = plots.summary(rows, '')
  axes = figure.axes[1]
  widths = [bar.get_width() for bar in axes.patches]
  assert widths == pytest.approx([1, 0, 1.2, 1.3])
  texts = [text.get_text() for text in axes.texts]
  assert texts == ['1.00x', '1.20x', '1.30x']


@pytest.mark.parametrize('fastest', [0.7, 0.98, 4.2])
def test_no_number_lies_on_the_line_or_on_a_bar(fastest):
  rows = _rows(6, ['overall'])
  for i, row in enumerate(rows[1:]):
    speedup = fastest - i / 10
    rows[i + 1] = dataclasses.replace(
      row, speedup=speedup, speedup_ci95=[speedup - 0.1, speedup + 0.1]
    )
  figure = plots.summary(rows, 'title')
  figure.draw_without_rendering()
  axes = figure.axes[1]
  numbers = [text.get_window_extent() for text in axes.texts]
  assert len(numbers) == len(rows)
  places = [bar.get_window_extent().x1 for bar in axes.patches]
  places += [axes.transData.transform((x, 0))[0] for x in (1, fastest + 0.1)]
  assert max(places) < min(box.x0 for box in numbers)
  assert all(box.x1 < axes.get_window_extent().x1 for box in numbers)


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('eagle3', 'eagle3'),
    ('a rather long name of a method', 'a rather long name of a\nmethod'),
    ('x' * 60, 'x' * 24 + '\n' + 'x' * 23 + '…'),
    ('', ''),
  ],
)
def test_name_has_two_lines_at_most(name, expected):
  assert figures.label(name) == expected
