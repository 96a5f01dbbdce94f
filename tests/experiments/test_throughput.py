"""What `python -m experiments.throughput` prints and leaves."""

import json
import re

import pytest

from experiments import evaluation
from experiments import methods
from experiments import refilling
import specsample

_FLAGS = (
  '--gin_file=configs/runs/throughput.gin',
  '--gin_bindings=Evaluation.batch_size = 2',
  '--gin_bindings=Comparison.num_requests = 7',
  '--gin_bindings=Comparison.max_new_tokens = (3, 12)',
  '--gin_bindings=Comparison.repeats = 2',
  "--gin_bindings=Evaluation.methods = {'ngram': @ngram/methods.Method()}",
  '--limit=3',
)


def _comparison(**kwargs):
  none = {'none': methods.Method(specsample.drafters.NoDraft())}
  target = specsample.Loaded(None, {}, None)
  own = evaluation.Evaluation(target=target, methods=none)
  return refilling.Comparison(evaluation=own, **kwargs)


def test_both_ways_are_measured_and_give_the_same(tiny, commands, tmp_path):
  outcome = commands.run('throughput', *_FLAGS, *tiny, f'--out={tmp_path}')
  assert outcome.code == 0, outcome.err
  result = json.loads((tmp_path / 'throughput.json').read_text())
  assert {'hardware', 'versions', 'git_commit', 'command'} < result.keys()
  (row,) = result['rows']
  assert row['method'] == 'ngram'
  assert row['requests'] == 7
  assert row['different'] == 0
  assert 7 < row['tokens'] <= 3 * 4 + 12 * 3
  static, refilled = row['static_seconds'], row['refilled_seconds']
  assert len(static) == len(refilled) == 2
  rate = 2 * row['tokens'] / sum(refilled)
  assert row['refilled_tokens_per_s'] == pytest.approx(rate)
  assert row['ratio'] == pytest.approx(sum(static) / sum(refilled))
  low, high = row['ratio_ci95']
  assert low <= row['ratio'] <= high
  assert re.search(f'ngram +2 +{row["tokens"]} ', outcome.out)
  assert 'ngram: every output is the same both ways' in outcome.out


def test_a_prompt_that_is_asked_again_is_continued_further():
  comparison = _comparison(num_requests=5, max_new_tokens=(1, 2))
  found = comparison.requests([[7], [8]])
  assert [(one.prompt, one.max_new_tokens) for one in found] == [
    ([7], 1),
    ([8], 2),
    ([7], 2),
    ([8], 1),
    ([7], 1),
  ]
  assert [one.number for one in found] == list(range(5))


@pytest.mark.parametrize(
  'kwargs',
  [{'num_requests': 0}, {'repeats': 0}, {'max_new_tokens': ()}],
)
def test_refuses_to_measure_nothing(kwargs):
  (name,) = kwargs
  with pytest.raises(ValueError, match=f'Comparison.{name} is'):
    _comparison(**kwargs)
