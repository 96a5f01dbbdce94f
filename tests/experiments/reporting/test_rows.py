"""Rows of a table: ratios, intervals, and the files that hold them."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from experiments.decoding import display
from experiments.decoding import stream
from experiments.evaluation import results
from experiments.reporting import files
from experiments.reporting import intervals
from experiments.reporting import ratios as ratios_lib
from experiments.reporting import rows as rows_lib
from specsample import stats
from specsample.types import StopReason
from tests.experiments import reports
from tests.experiments.evaluation import made_up


def _run(seconds, tokens=100, **changes):
  return made_up.generation(tokens, 50, seconds=seconds, **changes)


def _runs(*seconds):
  """Returns generations in a batch each."""
  return [_run(s, batch=i) for i, s in enumerate(seconds)]


def _row(**changes):
  values = {'verify_ms_by_width': {'0': 16.0, '2': 21.5}, 'plain_rounds': 0.25}
  return rows_lib.Row(**reports.row('ngram', 'overall', 2) | values | changes)


def test_speedup_is_the_ratio_of_seconds_per_token():
  baseline = _runs(3.0, 1.0)
  runs = [_run(1.0, tokens=50), _run(1.0, batch=1)]
  # 4 s for 200 tokens against 2 s for 150.
  assert ratios_lib.measure(runs, baseline)['speedup'] == pytest.approx(1.5)


def test_interval_of_a_mean_is_students():
  # 10, 11 and 15 ms per token: 12 +- 4.303 sqrt(7 / 3).
  found = ratios_lib.measure(_runs(1.0, 1.1, 1.5))
  assert found['ms_per_token_ci95'] == pytest.approx([5.428, 18.572], abs=1e-3)
  assert ratios_lib.measure(_runs(1.0, 1.1))['ms_per_token_ci95'] is None


def test_interval_of_a_speedup_is_paired():
  # The times differ between prompts, but little between methods.
  seconds = [1.0, 3.0, 8.0, 2.0, 20.0, 5.0]
  factors = [1.4, 1.6, 1.5, 1.45, 1.55, 1.5]
  runs = _runs(*(s / f for s, f in zip(seconds, factors, strict=True)))
  found = ratios_lib.measure(runs, _runs(*seconds))
  low, high = found['speedup_ci95']
  assert 1.4 <= low < found['speedup'] < high <= 1.6
  # A constant ratio has an interval of no width.
  halves = _runs(*(s / 2 for s in seconds))
  found = ratios_lib.measure(halves, _runs(*seconds))
  assert found['speedup_ci95'] == pytest.approx([2, 2])


def test_interval_is_of_whole_batches():
  # Three batches of two prompts, each equivalent to one prompt of 200 tokens.
  baseline = _runs(*[0.5] * 6)
  runs = _runs(0.5, 0.3, 0.25, 0.35, 0.3, 0.4)
  in_pairs = lambda generations: [
    dataclasses.replace(generation, batch=i // 2)
    for i, generation in enumerate(generations)
  ]
  baseline, runs = in_pairs(baseline), in_pairs(runs)
  found = ratios_lib.measure(runs, baseline)
  joined = ratios_lib.measure(_runs(0.8, 0.6, 0.7), _runs(*[1.0] * 3))
  for name in ('speedup', 'speedup_ci95'):
    assert found[name] == pytest.approx(joined[name])
  assert ratios_lib.measure(runs[:2], baseline[:2])['speedup_ci95'] is None


def test_spec_bench_means_weigh_prompts_alike():
  baseline = _runs(1.0, 1.0)
  # 200 and 25 tokens per second against 100 and 100.
  runs = [_run(0.5), _run(2.0, tokens=50, batch=1)]
  found = ratios_lib.measure(runs, baseline)
  assert found['mean_speedup'] == pytest.approx(225 / 200)
  # All tokens together: 10 ms per token against 2.5 s for 150.
  assert found['speedup'] == pytest.approx(0.01 / (2.5 / 150))


def test_samples_of_a_prompt_are_drawn_together():
  # Two samples of two prompts count as two prompts with twice the seconds.
  twice = [
    dataclasses.replace(one, sample=sample)
    for sample in (0, 1)
    for one in _runs(1.0, 0.5)
  ]
  baseline = _runs(1.0, 1.0)
  once = ratios_lib.row_fields(_runs(1.0, 0.5), baseline)
  assert once['prompts'] == 2
  assert once['samples'] == 1
  found = ratios_lib.row_fields(twice, baseline * 2)
  assert found['prompts'] == 2
  assert found['samples'] == 2
  assert found['tokens'] == 2 * once['tokens']
  assert found['speedup_ci95'] == pytest.approx(once['speedup_ci95'])


def test_row_without_a_token_has_no_time_per_token():
  # As if the target's first logits were already invalid.
  runs = _runs(1.0, 2.0, 3.0)
  empty = dataclasses.replace(
    runs[0], tokens=[], log_probs=[], stats=stats.Stats(0, 1, (0, 1), (1, 0))
  )
  alone = ratios_lib.row_fields([empty], [runs[0]])
  assert alone['ms_per_token'] is None
  # One of two batches has no time per token, so there is no interval.
  mixed = ratios_lib.row_fields([empty, runs[1]], runs[:2])
  assert mixed['ms_per_token_ci95'] is None
  json.dumps(mixed, allow_nan=False)
  mixed = ratios_lib.row_fields([empty, *runs[1:]], runs)
  for name in ('ms_per_token', 'speedup'):
    assert np.isfinite(mixed[f'{name}_ci95']).all()
  # It shares a batch with another row and gets none of its seconds.
  beside = dataclasses.replace(empty, seconds=0.0, prompt=1)
  shared = ratios_lib.row_fields([beside, runs[0]], runs[:1] * 2)
  assert shared['ms_per_token'] == pytest.approx(10)
  assert shared['mean_speedup'] == pytest.approx(0.5)


def test_table_names_its_rules_and_those_that_are_not_exact():
  exact = _row()
  assert results.rule_lines([exact]) == []
  drawn = _row(temperature=1.0)
  lossy = _row(
    method='heads', verifier='typical', lossless=False, temperature=1.0
  )
  warned, kinds = results.rule_lines([drawn, lossy])
  assert 'heads: verify.typical is lossy' in warned
  rules = 'ngram chain (point_mass), heads typical (point_mass)'
  assert kinds.plain.endswith(rules)


def test_generation_without_a_token_has_no_time_per_token():
  last = stream.Chunk(
    tokens=[],
    origins=[],
    stats=stats.Stats(0, 1, (0, 1), (1, 0)),
    stop_reason=StopReason.INVALID_LOGITS,
    seconds=0.5,
  )
  assert stream.metrics(last)['ms_per_token'] is None
  assert stream.metrics(last)['tokens_per_second'] is None
  assert '(- ms per token)' in display.metrics_text(last)


def test_measured_fields():
  counts = stats.Stats(5, 2, (0, 0, 2), (0, 1, 1))
  runs = [_run(seconds, tokens=5, stats=counts) for seconds in (0.1, 0.2)]
  fields = ratios_lib.row_fields(runs, None)
  assert fields['ms_per_token'] == pytest.approx(30)
  expected = {
    'prompts': 2,
    'tokens': 10,
    'rounds': 4,
    'tokens_per_round': 2.5,
    'plain_rounds': 0,
    'acceptance_by_position': [1.0, 0.5],
    'ms_per_token_ci95': None,  # only one batch
    'speedup': None,
    'speedup_ci95': None,
  }
  assert {name: fields[name] for name in expected} == expected


def test_what_was_never_drafted_has_no_share():
  counts = stats.Stats(5, 5, (5, 0, 0), (5, 0, 0))
  run = _run(1.0, tokens=5, stats=counts)
  fields = ratios_lib.row_fields([run], [run])
  assert fields['acceptance_by_position'] == [None, None]
  assert fields['acceptance'] is fields['acceptance_ci95'] is None
  assert fields['plain_rounds'] == 1
  assert fields['speedup'] == 1
  alone = dataclasses.replace(counts, proposed=(5,), accepted=(5,))
  run = dataclasses.replace(run, stats=alone)
  assert ratios_lib.row_fields([run], None)['plain_rounds'] is None


def test_generation_survives_json():
  generation = _run(0.25)
  text = json.dumps(generation.to_json())
  assert rows_lib.Generation.from_json(json.loads(text)) == generation


def test_csv_and_json_hold_the_same(tmp_path):
  rows = [_row(), _row(category='a, "b"', speedup=None, speedup_ci95=None)]
  files.write_csv(tmp_path / 'results.csv', rows)
  with (tmp_path / 'results.csv').open(newline='') as file:
    read = list(csv.DictReader(file))
  texts = {f.name for f in dataclasses.fields(rows_lib.Row) if f.type is str}
  values = [
    {
      name: cell if name in texts else json.loads(cell or 'null')
      for name, cell in line.items()
    }
    for line in read
  ]
  assert values == [dataclasses.asdict(row) for row in rows]


def test_file_is_whole_or_as_it_was(tmp_path):
  path = tmp_path / 'result.json'
  files.write_json(path, {'a': 1})
  with pytest.raises(ValueError, match='not JSON compliant'):
    files.write_json(path, {'a': float('nan')})
  assert json.loads(path.read_text()) == {'a': 1}
  assert [file.name for file in tmp_path.iterdir()] == ['result.json']


def _ratio(sums):
  return sums['above'] / sums['below']


@pytest.mark.parametrize('count', [3, 4, 12, 80])
def test_as_many_hold_the_value_as_they_say(count):
  """A ratio over unequal prompts: percentiles of 3 held it 74% of the time."""
  rng = np.random.default_rng(count)
  hits, repeats = 0, 2000
  for _ in range(repeats):
    below = rng.gamma(5.0, 20.0, count)
    above = below * rng.normal(1.5, 0.2, count)
    low, high = intervals.interval(_ratio, {'above': above, 'below': below})
    hits += low <= 1.5 <= high
  assert 0.925 < hits / repeats < 0.965


@pytest.mark.parametrize(
  ('above', 'below', 'bounds', 'expected'),
  [
    # Of a mean: 3.182 is t of 3 degrees of freedom, the mean's error
    # sqrt(14 / 3 / 4).
    ([1, 2, 3, 6], [1, 1, 1, 1], {'least': -9.0}, [-0.437, 6.437]),
    # It stays where the value may be.
    ([0, 1, 1], [1, 1, 1], {'most': 1.0}, [0, 1]),
    ([0, 1, 1], [1, 1, 1], {'least': -5.0}, [-0.768, 2.101]),
    # Units that are alike leave no width.
    ([2, 4, 8], [1, 2, 4], {}, [2, 2]),
    # One or two units say nothing of others.
    ([1], [1], {}, None),
    ([1, 2], [1, 1], {}, None),
    ([0, 0, 0], [0, 0, 0], {}, None),  # there is no ratio
  ],
)
def test_interval_by_hand(above, below, bounds, expected):
  terms = {'above': above, 'below': below}
  found = intervals.interval(_ratio, terms, **bounds)
  if expected is None:
    assert found is None
  else:
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(('count', 'share'), [(4, 0.1), (4, 0.5), (20, 0.05)])
def test_shares_of_few_hold_the_value(count, share):
  """With 4 units, a tenth right, the jackknife held it 36% of the time."""
  hits = np.random.default_rng(count).binomial(count, share, 2000)
  held = 0
  for right, times in zip(*np.unique(hits, return_counts=True), strict=True):
    low, high = intervals.of_shares([1.0] * right + [0.0] * (count - right))
    held += times * (low <= share <= high)
  assert held / len(hits) > 0.94


def test_shares_that_are_all_alike_are_not_certain():
  assert intervals.of_shares([0.0] * 4) == pytest.approx([0, 0.6], abs=0.01)
  assert intervals.of_shares([1.0] * 4) == pytest.approx([0.4, 1], abs=0.01)
  assert intervals.of_shares([0.5] * 4) is None
  assert intervals.of_shares([1.0, 0.0]) is None


def test_of_values_between_it_is_students():
  values = np.asarray([0.1, 0.5, 0.9, 0.3])
  terms = {'above': values, 'below': np.ones(4)}
  assert intervals.of_shares(values) == intervals.interval(
    _ratio, terms, most=1.0
  )
