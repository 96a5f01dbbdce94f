"""What `python -m experiments.throughput` prints and leaves."""

import dataclasses
import json
import re

import jax
import pytest

from experiments import evaluation
from experiments import methods
from experiments import refilling
import specsample
from specsample.testing import hash_model

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
  assert row['ratio_ci95'] is None  # of two repeats
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noting(hash_model.HashModel):
  """Notes the size of every cache that is made for it."""

  slots: set = dataclasses.field(default_factory=set, compare=False)

  def init_cache(self, batch_size, max_length, max_new=None):
    self.slots.add(max_length)
    return super().init_cache(batch_size, max_length, max_new)


def _ways(checkpoint, model, sizes, **kwargs):
  """The units of prompts of so many tokens, an answer of 1 or 9 each."""
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  own = evaluation.Evaluation(
    target=target,
    methods={'none': methods.Method(specsample.drafters.NoDraft())},
    batch_size=kwargs.pop('batch_size'),
  )
  comparison = refilling.Comparison(
    evaluation=own,
    num_requests=len(sizes),
    max_new_tokens=(1, 9),
    repeats=1,
    **kwargs,
  )
  return list(refilling.units(comparison, [[1] * size for size in sizes]))


def test_requests_that_emit_nothing_are_timed(checkpoint):
  model = hash_model.HashModel(vocab_size=16, scale=float('nan'))
  for unit in _ways(checkpoint, model, (5, 7), batch_size=2):
    value = unit.run()
    assert value['seconds'] > 0
    assert [one['tokens'] for one in value['generations']] == [[], []]


def test_both_ways_have_caches_of_the_same_size(checkpoint):
  # Of batches [5, 40] and [200, 7] the second one alone is padded to 256.
  model = _Noting(vocab_size=16)
  slots = []
  for unit in _ways(checkpoint, model, (5, 40, 200, 7), batch_size=2):
    model.slots.clear()
    jax.clear_caches()  # a cache is made when a program is traced
    unit.run()
    slots.append(set(model.slots))
  assert slots == [{256}, {256}]  # of 201 tokens, whole chunks


@pytest.mark.parametrize(
  ('batch_size', 'group_size'),
  [
    (1, None),  # fewer rows than sizes of a prefill
    (5, 2),  # prefills are as wide as the longer one of two
    (3, 2),
    (9, 3),  # more rows than requests
  ],
)
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, batch_size, group_size
):
  model = hash_model.HashModel(vocab_size=16, seed=batch_size)
  sizes = (5, 6, 40, 7, 70, 8, 100)  # the last group of two is one short
  for unit in _ways(
    checkpoint, model, sizes, batch_size=batch_size, group_size=group_size
  ):
    before = num_compiled()
    unit.warm_up()
    compiled = num_compiled()
    assert compiled > before
    unit.run()
    assert num_compiled() == compiled, unit.label


@pytest.mark.parametrize(
  'kwargs',
  [
    {'num_requests': 0},
    {'repeats': 0},
    {'max_new_tokens': ()},
    {'group_size': 0},
  ],
)
def test_refuses_to_measure_nothing(kwargs):
  (name,) = kwargs
  with pytest.raises(ValueError, match=f'Comparison.{name} is'):
    _comparison(**kwargs)
