"""The output and files of `python -m experiments.throughput`."""

import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.batching import audits as audits_lib
from experiments.batching import comparison as comparison_lib
from experiments.batching import report
from experiments.command import journal as journal_lib
from experiments.evaluation import audits
from experiments.evaluation import evaluation
from experiments.reporting import rows
import specsample
from specsample import stats
from specsample import testing
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
  return comparison_lib.Comparison(evaluation=own, **kwargs)


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
  assert row['ratio_ci95'] is None  # only two repeats
  assert re.search(f'ngram +2 +{row["tokens"]} ', outcome.out)
  assert 'ngram: every output is the same both ways' in outcome.out
  assert result['divergences'] == []
  # The same command finds a fault in the journal.
  path = tmp_path / 'journal.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  for i, record in enumerate(map(json.loads, lines)):
    if record.get('key') == ['refilled', 'ngram', 0]:
      tokens = record['value']['generations'][1]['tokens']
      tokens[1] = (tokens[1] + 1) % 9
      lines[i] = json.dumps(record) + '\n'
  path.write_text(''.join(lines))
  outcome = commands.run('throughput', *_FLAGS, *tiny, f'--out={tmp_path}')
  assert outcome.code == 0, outcome.err
  assert 'ngram: 1 outputs DIFFER' in outcome.out
  (found,) = json.loads((tmp_path / 'throughput.json').read_text())[
    'divergences'
  ]
  assert (found['prompt'], found['position']) == (2, 1)
  assert found['verdict'] == 'DIFFERS'


_REQUESTS = [[3, 1, 4], [1, 5], [9, 2, 6]]
_ANSWER = [9, 2, 6, 5]


def _decoded(folder, target, temperature=0.0):
  """Makes up outputs: equal ones, ones that part at a tie, and different ones.

  By their log-probabilities, none of the tokens were equally likely.
  """
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  comparison = comparison_lib.Comparison(
    evaluation=evaluation.Evaluation(
      target=target,
      methods={
        'ngram': methods.Method(ngram),
        'lossy': methods.Method(ngram, specsample.verify.Typical()),
      },
      sampling=specsample.Sampling(
        temperature=temperature, logit_bias=_only_two(target)
      ),
      batch_size=2,
    ),
    num_requests=3,
    max_new_tokens=(4,),
    repeats=1,
  )
  answers = {
    'static': [_ANSWER, [7, *_ANSWER[1:]], [7, *_ANSWER[1:]]],
    'refilled': [_ANSWER, [8, *_ANSWER[1:]], [0, *_ANSWER[1:]]],
  }
  journal = journal_lib.Journal(folder, {})
  for (way, outputs), name in itertools.product(
    answers.items(), comparison.evaluation.methods
  ):
    generations = [
      rows.Generation(
        batch=0,
        category='',
        prompt_tokens=len(prompt),
        tokens=tokens,
        log_probs=[-1.0 if way == 'static' else -1.1] * len(tokens),
        seconds=1.0,
        stats=stats.Stats(len(tokens), 3, (0, 3), (0, 3)),
      ).to_json()
      for prompt, tokens in zip(_REQUESTS, outputs, strict=True)
    ]
    value = {'seconds': 3.0, 'generations': generations}
    journal.add((way, name, 0), value)
  return comparison, journal


def _only_two(target):
  bias = np.zeros(target.model.vocab_size, np.float32)
  bias[[7, 8]] = 50
  return bias


@pytest.fixture(scope='module')
def in_bfloat16(checkpoint):
  """A target for which 7 and 8 are equally likely."""
  model = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')
  params = dict(model.init(jax.random.key(0)))
  kernel = params['unembedding']
  params['unembedding'] = kernel.at[:, 8].set(kernel[:, 7])
  return specsample.Loaded(model, params, specsample.load(checkpoint).tokenizer)


def test_differences_are_audited(in_bfloat16, tmp_path, capsys):
  comparison, journal = _decoded(tmp_path, in_bfloat16)
  units = audits_lib.units(comparison, _REQUESTS, journal)
  # A lossy rule may emit other tokens than the most likely ones.
  assert [unit.key for unit in units] == [
    (audits.KIND, 'ngram', 1),
    (audits.KIND, 'ngram', 2),
  ]
  for unit in units:
    journal.add(unit.key, unit.run())
  tie, fault = journal.of(audits.KIND)
  assert (tie['verdict'], fault['verdict']) == ('tie', 'DIFFERS')
  assert fault['audit']['float32']['lead'] > fault['audit']['bound']
  ngram, lossy = report.rows(comparison, journal)
  assert (ngram.different, ngram.ties, ngram.audited) == (2, 1, True)
  assert (lossy.different, lossy.ties, lossy.audited) == (2, 0, False)
  found = [tie, fault, tie, tie]
  report.show(tmp_path, [ngram, lossy], found, 'prompts')
  text = ' '.join(capsys.readouterr().out.split())
  assert 'ngram: 1 outputs DIFFER, and not at float ties' in text
  assert 'lossy: 2 outputs differ; by a lossy rule a rounding is' in text
  assert "static's token leads by" in text
  assert '1 more of ngram in throughput.json' in text
  report.write(tmp_path, [ngram, lossy], found)
  written = json.loads((tmp_path / 'throughput.json').read_text())
  assert written['divergences'] == found


def test_what_is_drawn_is_not_audited(in_bfloat16, tmp_path):
  comparison, journal = _decoded(tmp_path, in_bfloat16, temperature=1.0)
  assert audits_lib.units(comparison, _REQUESTS, journal) == []
  row, _ = report.rows(comparison, journal)
  assert (row.different, row.ties, row.audited) == (2, 0, False)


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
  """Records the size of every cache that is made for it."""

  slots: set = dataclasses.field(default_factory=set, compare=False)

  def init_cache(self, batch_size, max_length, max_new=None):
    self.slots.add(max_length)
    return super().init_cache(batch_size, max_length, max_new)


def _ways(checkpoint, model, sizes, **kwargs):
  """Returns the units for prompts of these sizes, with 1 or 9 new tokens."""
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  own = evaluation.Evaluation(
    target=target,
    methods={'none': methods.Method(specsample.drafters.NoDraft())},
    batch_size=kwargs.pop('batch_size'),
  )
  comparison = comparison_lib.Comparison(
    evaluation=own,
    num_requests=len(sizes),
    max_new_tokens=(1, 9),
    repeats=1,
    **kwargs,
  )
  return list(comparison_lib.units(comparison, [[1] * size for size in sizes]))


def test_requests_that_emit_nothing_are_timed(checkpoint):
  model = hash_model.HashModel(vocab_size=16, scale=float('nan'))
  for unit in _ways(checkpoint, model, (5, 7), batch_size=2):
    value = unit.run()
    assert value['seconds'] > 0
    assert [one['tokens'] for one in value['generations']] == [[], []]


def test_both_ways_have_caches_of_the_same_size(checkpoint):
  # Batch [200, 7] needs padding to 256; batch [5, 40] alone would need less.
  model = _Noting(vocab_size=16)
  slots = []
  for unit in _ways(checkpoint, model, (5, 40, 200, 7), batch_size=2):
    model.slots.clear()
    jax.clear_caches()  # a cache is made when a program is traced
    unit.run()
    slots.append(set(model.slots))
  assert slots == [{256}, {256}]  # 201 tokens, in whole chunks


@pytest.mark.parametrize(
  ('batch_size', 'group_size'),
  [
    (1, None),  # fewer rows than there are prefill sizes
    (5, 2),  # prefills are as wide as the longer prompt of two
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


def test_an_audit_that_failed_is_no_fault(in_bfloat16, tmp_path, capsys):
  comparison, journal = _decoded(tmp_path, in_bfloat16)
  tie, _ = audits_lib.units(comparison, _REQUESTS, journal)
  journal.add(tie.key, tie.run())  # the other one failed
  ngram, _ = report.rows(comparison, journal)
  assert (ngram.different, ngram.ties, ngram.unaudited) == (2, 1, 1)
  report.show(tmp_path, [ngram], journal.of(audits.KIND), 'prompts')
  text = ' '.join(capsys.readouterr().out.split())
  assert '1 outputs differ and could not be audited' in text
  assert 'DIFFER' not in text


@pytest.mark.parametrize(
  ('name', 'value'), [('limit', 2), ('carry_policies', True)]
)
def test_settings_of_evaluate_alone_are_refused(
  tiny, commands, tmp_path, name, value
):
  out = tmp_path / 'out'
  outcome = commands.run(
    *('throughput', *_FLAGS, *tiny, f'--out={out}'),
    f'--gin_bindings=Evaluation.{name} = {value}',
  )
  assert outcome.code == 2
  assert f'Evaluation.{name} is {value}, which this command' in outcome.err
  assert not out.exists()
