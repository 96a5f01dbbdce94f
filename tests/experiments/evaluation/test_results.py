"""Tables and sentences about an evaluation's rows, by hand."""

from experiments.evaluation import results
from experiments.reporting import rows as rows_lib
from tests.experiments import reports


def _row(method, category, **values):
  return rows_lib.Row(**reports.row(method, category, 2, **values))


def test_a_score_that_a_method_lacks_is_a_dash():
  share = {'name': 'share', 'value': 0.25, 'ci95': [0.125, 0.5]}
  exact = {'name': 'exact', 'value': 1.0, 'ci95': None}
  rows = [
    _row('a', 'overall', scores={'share': share, 'exact': exact}),
    _row('b', 'overall', scores={'exact': exact}),
  ]
  table = results.scores(rows)
  assert table.headings == ['method', 'share', 'exact']
  assert table.rows == [
    ['a', '0.250 (0.125-0.500)', '1.000'],
    ['b', '-', '1.000'],
  ]


def test_a_category_has_a_cell_for_each_method_but_the_baseline():
  rows = [
    _row('autoregressive', 'overall'),
    _row('a', 'overall', speedup=1.5),
    _row('b', 'overall', speedup=2.0),
    _row('autoregressive', 'math', prompts=7),
    _row('a', 'math', speedup=1.25, prompts=7),
  ]
  table = results.by_category(rows, with_intervals=True)
  assert table.headings == ['category', 'prompts', 'a', 'b']
  assert table.rows == [
    ['overall', '2', '1.50x (1.25-1.75), 2.00', '2.00x (1.25-1.75), 2.00'],
    ['math', '7', '1.25x (1.25-1.75), 2.00', '-'],
  ]


def test_values_that_look_wrong_are_explained():
  plain = _row('a', 'overall', overhead_ms=0.5, acceptance=0.6)
  assert results.rest_notes([plain]) == []
  assert results.acceptance_notes([plain]) == []
  (rest,) = results.rest_notes([plain, _row('b', 'overall', overhead_ms=-2.34)])
  assert rest.startswith('A negative rest is noise')
  shares = {'acceptance': 0.6, 'acceptance_by_position': [0.5, None, 0.55]}
  (acceptance,) = results.acceptance_notes(
    [plain, _row('b', 'overall', **shares)]
  )
  assert 'may exceed that of every position' in acceptance
