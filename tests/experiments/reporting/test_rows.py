import csv
import dataclasses
import json

import numpy as np
import pytest

from experiments.decoding import display
from experiments.decoding import stream
from experiments.evaluation import results
from experiments.reporting import files
from experiments.reporting import ratios as ratios_lib
from experiments.reporting import rows as rows_lib
from specsample import stats
from specsample.types import StopReason
from tests.experiments import reports


def _generation(seconds, tokens=100, batch=0):
  return rows_lib.Generation(
    batch=batch,
    category='a',
    prompt_tokens=10,
    tokens=list(range(tokens)),
    log_probs=[-1.0] * tokens,
    seconds=seconds,
    stats=stats.Stats(tokens, 50, (0, 50), (0, 50)),
  )


def _generations(*seconds):
  """Returns generations in a batch each."""
  return [_generation(s, batch=i) for i, s in enumerate(seconds)]


def _row(**changes):
  values = {'verify_ms_by_width': {'0': 16.0, '2': 21.5}, 'plain_rounds': 0.25}
  return rows_lib.Row(**reports.row('ngram', 'overall', 2) | values | changes)


def test_speedup_is_the_ratio_of_seconds_a_token():
  baseline = _generations(3.0, 1.0)
  runs = [_generation(1.0, tokens=50), _generation(1.0, batch=1)]
  # 4 s for 200 tokens against 2 s for 150.
  assert ratios_lib.measure(runs, baseline)['speedup'] == pytest.approx(1.5)


def test_a_constant_ratio_has_an_interval_of_no_width():
  baseline = _generations(1.0, 2.0, 5.0, 9.0)
  runs = _generations(0.5, 1.0, 2.5, 4.5)
  low, high = ratios_lib.measure(runs, baseline)['speedup_ci95']
  assert low == pytest.approx(2)
  assert high == pytest.approx(2)


def test_the_interval_of_a_mean_is_students():
  # 10, 11 and 15 ms per token: 12 +- 4.303 sqrt(7 / 3).
  found = ratios_lib.measure(_generations(1.0, 1.1, 1.5))
  assert found['ms_per_token_ci95'] == pytest.approx([5.428, 18.572], abs=1e-3)
  assert ratios_lib.measure(_generations(1.0, 1.1))['ms_per_token_ci95'] is None


def test_the_interval_is_paired_and_repeatable():
  # The times differ between prompts, but little between methods.
  seconds = [1.0, 3.0, 8.0, 2.0, 20.0, 5.0]
  factors = [1.4, 1.6, 1.5, 1.45, 1.55, 1.5]
  baseline = _generations(*seconds)
  ratios = [s / f for s, f in zip(seconds, factors, strict=True)]
  runs = _generations(*ratios)
  low, high = ratios_lib.measure(runs, baseline)['speedup_ci95']
  assert (
    1.4 <= low < ratios_lib.measure(runs, baseline)['speedup'] < high <= 1.6
  )
  assert ratios_lib.measure(runs, baseline)['speedup_ci95'] == [low, high]


def test_the_interval_is_of_whole_batches():
  # Three batches of two prompts, each equivalent to one prompt of 200 tokens.
  baseline = _generations(*[0.5] * 6)
  runs = _generations(0.5, 0.3, 0.25, 0.35, 0.3, 0.4)
  in_pairs = lambda generations: [
    dataclasses.replace(generation, batch=i // 2)
    for i, generation in enumerate(generations)
  ]
  baseline, runs = in_pairs(baseline), in_pairs(runs)
  found = ratios_lib.measure(runs, baseline)
  joined = ratios_lib.measure(
    _generations(0.8, 0.6, 0.7), _generations(*[1.0] * 3)
  )
  for name in ('speedup', 'speedup_ci95'):
    assert found[name] == pytest.approx(joined[name])
  assert ratios_lib.measure(runs[:2], baseline[:2])['speedup_ci95'] is None


def test_spec_bench_means_weigh_prompts_alike():
  baseline = _generations(1.0, 1.0)
  # 200 and 25 tokens per second against 100 and 100.
  runs = [_generation(0.5), _generation(2.0, tokens=50, batch=1)]
  found = ratios_lib.measure(runs, baseline)
  assert found['mean_speedup'] == pytest.approx(225 / 200)
  # All tokens together: 10 ms per token against 2.5 s for 150.
  assert found['speedup'] == pytest.approx(0.01 / (2.5 / 150))


def test_samples_of_a_prompt_are_drawn_together():
  # Two samples of two prompts count as two prompts with twice the seconds.
  twice = [
    dataclasses.replace(one, sample=sample)
    for sample in (0, 1)
    for one in _generations(1.0, 0.5)
  ]
  baseline = _generations(1.0, 1.0)
  once = ratios_lib.row_fields(_generations(1.0, 0.5), baseline)
  assert once['prompts'] == 2
  assert once['samples'] == 1
  found = ratios_lib.row_fields(twice, baseline * 2)
  assert found['prompts'] == 2
  assert found['samples'] == 2
  assert found['tokens'] == 2 * once['tokens']
  assert found['speedup_ci95'] == pytest.approx(once['speedup_ci95'])


def test_what_has_no_value_has_no_interval():
  none = stats.Stats(100, 100, (100, 0), (100, 0))
  runs = [dataclasses.replace(x, stats=none) for x in _generations(1.0, 2.0)]
  found = ratios_lib.measure(runs)
  assert found['acceptance'] is None
  assert found['acceptance_ci95'] is None
  assert found['speedup'] is None
  assert found['ms_per_token'] == pytest.approx(15)
  assert found['ms_per_token_ci95'] is None  # only two batches


def test_a_row_without_a_token_has_no_time_a_token():
  # As if the target's first logits were already invalid.
  runs = _generations(1.0, 2.0, 3.0)
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


def test_a_table_names_its_rules_and_those_that_are_not_exact():
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


def test_a_generation_without_a_token_has_no_time_a_token():
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
  runs = [_generation(0.1, tokens=5), _generation(0.2, tokens=5)]
  runs = [dataclasses.replace(run, stats=counts) for run in runs]
  fields = ratios_lib.row_fields(runs, None)
  assert fields['prompts'] == 2
  assert fields['tokens'] == 10
  assert fields['rounds'] == 4
  assert fields['tokens_per_round'] == 2.5
  assert fields['plain_rounds'] == 0
  assert fields['acceptance_by_position'] == [1.0, 0.5]
  assert fields['ms_per_token'] == pytest.approx(30)
  assert fields['speedup'] is None
  assert fields['speedup_ci95'] is None


def test_a_position_never_drafted_has_no_share():
  counts = stats.Stats(5, 5, (5, 0, 0), (5, 0, 0))
  run = dataclasses.replace(_generation(1.0, tokens=5), stats=counts)
  fields = ratios_lib.row_fields([run], [run])
  assert fields['acceptance_by_position'] == [None, None]
  assert fields['plain_rounds'] == 1
  assert fields['speedup'] == 1
  alone = dataclasses.replace(counts, proposed=(5,), accepted=(5,))
  run = dataclasses.replace(run, stats=alone)
  assert ratios_lib.row_fields([run], None)['plain_rounds'] is None


def test_a_generation_survives_json():
  generation = _generation(0.25)
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


def test_a_file_is_whole_or_as_it_was(tmp_path):
  path = tmp_path / 'result.json'
  files.write_json(path, {'a': 1})
  with pytest.raises(ValueError, match='not JSON compliant'):
    files.write_json(path, {'a': float('nan')})
  assert json.loads(path.read_text()) == {'a': 1}
  assert [file.name for file in tmp_path.iterdir()] == ['result.json']
