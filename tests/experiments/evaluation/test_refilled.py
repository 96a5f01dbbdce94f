"""Rows that are refilled, beside the static batches of the same evaluation."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.decoding import prompts as prompts_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import refilled
from experiments.evaluation import results
from experiments.evaluation import table as table_lib
from experiments.reporting import rows as rows_lib
import specsample
from specsample import testing
from specsample.testing import hash_model
from tests.experiments.evaluation import made_up

_FLAGS = (
  '--gin_file=configs/runs/throughput.gin',
  '--gin_bindings=Evaluation.batch_size = 2',
  '--gin_bindings=Evaluation.max_new_tokens = 12',
  '--gin_bindings=Evaluation.answer_limits = (3, 12)',
  "--gin_bindings=Evaluation.methods = {'ngram': @ngram/methods.Method()}",
)
_PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6]]
_ANSWER = [9, 2, 6, 5]


def _entries(folder):
  """Returns the journal's entries, and its values by key."""
  lines = (folder / 'journal.jsonl').read_text().splitlines()
  entries = [json.loads(line) for line in lines]
  return entries, {tuple(one['key']): one['value'] for one in entries[1:]}


def _write(folder, entries):
  lines = [json.dumps(entry) + '\n' for entry in entries]
  (folder / 'journal.jsonl').write_text(''.join(lines))


def test_both_ways_are_measured_and_give_the_same(tiny, commands, tmp_path):
  file = tmp_path / 'prompts.txt'
  file.write_text(''.join(f'Is {i} an even number?\n' for i in range(7)))
  call = (
    *('evaluate', *_FLAGS, *tiny),
    *(f'--prompts={file}', f'--out={tmp_path}'),
  )
  outcome = commands.run(*call)
  assert outcome.code == 0, outcome.err
  entries, values = _entries(tmp_path)
  result = json.loads((tmp_path / 'result.json').read_text())
  row, *others = result['rows']
  both = [values['refilled', 'ngram', repeat] for repeat in range(2)]
  tokens = [
    one['tokens']
    for call in range(4)
    for one in values['generation', 'ngram', call]['generations']
  ]
  assert both[0]['tokens'] == both[1]['tokens'] == tokens
  assert [len(one) for one in tokens] == [3, 12, 3, 12, 3, 12, 3]
  assert row['tokens'] == 3 * 12 + 4 * 3
  seconds = sum(one['seconds'] for one in both)
  refilled_ms = 1e3 * seconds / (2 * row['tokens'])
  assert row['refilled_ms_per_token'] == pytest.approx(refilled_ms)
  speedup = row['ms_per_token'] / refilled_ms
  assert row['refilled_speedup'] == pytest.approx(speedup)
  low, high = row['refilled_speedup_ci95']
  assert low < speedup < high
  assert (row['refilled_tied'], row['refilled_differing']) == (0, 0)
  assert {one['refilled_speedup'] for one in others} == {None}
  assert 'ngram, refilled: every output equals static batches' in outcome.out
  assert f'{refilled_ms:.2f} ' in outcome.out

  # The same command decodes what the journal lacks, with the same outputs.
  _write(tmp_path, [one for one in entries if one.get('key', [''])[-1] != 1])
  assert commands.run(*call).code == 0
  _, again = _entries(tmp_path)
  assert again.keys() == values.keys()
  assert again['refilled', 'ngram', 0] == both[0]
  assert again['refilled', 'ngram', 1]['tokens'] == tokens
  assert again['refilled', 'ngram', 1]['seconds'] != both[1]['seconds']

  # It finds a fault in the journal.
  for one in entries:
    if one.get('key') == ['refilled', 'ngram', 0]:
      one['value']['tokens'][1][1] = (tokens[1][1] + 1) % 9
  _write(tmp_path, entries)
  outcome = commands.run(*call)
  assert outcome.code == 0, outcome.err
  assert '1 outputs DIFFER from static batches' in outcome.out
  result = json.loads((tmp_path / 'result.json').read_text())
  (found,) = result['divergences']
  assert (found['method'], found['prompt']) == ('ngram, refilled', 2)
  assert (found['position'], found['verdict']) == (1, 'DIFFERS')
  assert result['rows'][0]['refilled_differing'] == 1


@pytest.fixture(scope='module')
def in_bfloat16(checkpoint):
  """A target for which 7 and 8 are equally likely, and nothing else is."""
  model = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')
  params = dict(model.init(jax.random.key(0)))
  kernel = params['unembedding']
  params['unembedding'] = kernel.at[:, 8].set(kernel[:, 7])
  return specsample.Loaded(model, params, specsample.load(checkpoint).tokenizer)


def _decoded(folder, target, temperature=0.0):
  """Makes up outputs: equal ones, ones that part at a tie, and different ones.

  Only 7 and 8 are likely. The lossy method has the same outputs.
  """
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  bias = np.zeros(target.model.vocab_size, np.float32)
  bias[[7, 8]] = 50
  evaluation = evaluation_lib.Evaluation(
    target=target,
    methods={
      'ngram': methods.Method(ngram),
      'lossy': methods.Method(ngram, specsample.verify.Typical()),
    },
    sampling=specsample.Sampling(temperature=temperature, logit_bias=bias),
    max_new_tokens=len(_ANSWER),
    batch_size=len(_PROMPTS),
    refill=True,
  )
  of_batch = [_ANSWER, [7, *_ANSWER[1:]], [7, *_ANSWER[1:]]]
  again = [_ANSWER, [8, *_ANSWER[1:]], [0, *_ANSWER[1:]]]
  journal = journal_lib.Journal(folder, {})
  journal.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  for name in evaluation.methods:
    generations = [
      made_up.generation(tokens, prompt=i).to_json()
      for i, tokens in enumerate(of_batch)
    ]
    journal.add(('generation', name, 0), {'generations': generations})
    for repeat, seconds in enumerate((1.0, 2.0)):
      value = {'seconds': seconds, 'tokens': again}
      journal.add((refilled.KIND, name, repeat), value)
  return evaluation_lib.Part(
    evaluation=evaluation, tokens=_PROMPTS, journal=journal
  )


def test_differences_are_audited_unless_they_are_drawn(in_bfloat16, tmp_path):
  part = _decoded(tmp_path, in_bfloat16)
  tie, fault = audits.units(part, [conversations.turn(part, 0)])
  # A lossy rule may emit other tokens than the most likely ones.
  assert tie.key == (audits.KIND, 'ngram, refilled', 1)
  assert fault.key == (audits.KIND, 'ngram, refilled', 2)
  part.journal.add(tie.key, tie.run())
  found = table_lib.Table.of(part).refilled_mismatches
  assert found['ngram, refilled'] == rows_lib.Mismatches(1, 0, 1)
  assert found['lossy, refilled'] == rows_lib.Mismatches(0, 0, 2)
  part.journal.add(fault.key, fault.run())
  table = table_lib.Table.of(part)
  assert [one['verdict'] for one in table.divergences] == ['tie', 'DIFFERS']
  found = table.refilled_mismatches
  assert found['ngram, refilled'] == rows_lib.Mismatches(1, 1)
  row, *_ = table.rows
  assert (row.refilled_tied, row.refilled_differing) == (1, 1)
  # Both methods took 3 seconds for 12 tokens; the repeats take 1 and 2.
  assert row.refilled_ms_per_token == pytest.approx(1e3 * 3 / 24)
  assert row.refilled_speedup == pytest.approx(2)
  assert row.refilled_speedup_ci95 is None  # there is one batch
  lines = [line.plain for line in results.mismatch_lines(found, 'static')]
  assert lines[0].startswith('ngram, refilled: 1 outputs DIFFER from static')
  assert 'could not be audited' in lines[1]

  (tmp_path / 'drawn').mkdir()
  part = _decoded(tmp_path / 'drawn', in_bfloat16, temperature=1.0)
  assert not list(audits.units(part, [conversations.turn(part, 0)]))
  row, *_ = table_lib.Table.of(part).rows
  assert row.refilled_differing == 2


def _evaluation(checkpoint, seed=0, scale=4.0, **settings):
  """Returns an evaluation of answers of 1 or 9 tokens, in refilled rows."""
  model = hash_model.HashModel(vocab_size=16, seed=seed, scale=scale)
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  settings = {'answer_limits': (1, 9)} | settings
  return evaluation_lib.Evaluation(
    target=target,
    methods={'ngram': methods.Method(ngram)},
    max_new_tokens=9,
    refill=True,
    repeats=0,
    **settings,
  )


# With one row, there are fewer rows than prefill sizes; with nine, more rows
# than prompts.
@pytest.mark.nightly(but=('3',))
@pytest.mark.parametrize('batch_size', [1, 3, 9])
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, tmp_path, batch_size
):
  evaluation = _evaluation(
    checkpoint,
    seed=batch_size,
    batch_size=batch_size,
    sampling=specsample.Sampling(temperature=1.0),
  )
  tokens = [[1] * size for size in (5, 6, 40, 7, 70, 8, 100)]
  prompts = [prompts_lib.Prompt(str(i), '', '', i) for i in range(len(tokens))]
  part = evaluation_lib.Part(
    evaluation=evaluation,
    tokens=tokens,
    prompts=prompts,
    journal=journal_lib.Journal(tmp_path, {}),
  )
  _, *static, _ = decoding.units(part, conversations.turn(part, 0), {})
  (unit,) = refilled.units(part, 0)
  outputs = []
  for one in (unit, *static):
    one.warm_up()
    compiled = num_compiled()
    outputs.append(one.run())
    assert num_compiled() == compiled, one.label
  # Drawn tokens are the same in both, because the random streams are.
  assert outputs[0]['tokens'] == [
    generation['tokens']
    for value in outputs[1:]
    for generation in value['generations']
  ]
  lengths = [len(one) for one in outputs[0]['tokens']]
  assert lengths[::2] == [1] * 4
  assert 1 < max(lengths) <= 9


def test_prompts_that_are_answered_by_nothing_are_timed(checkpoint):
  evaluation = _evaluation(checkpoint, scale=float('nan'), batch_size=2)
  part = evaluation_lib.Part(evaluation=evaluation, tokens=[[1] * 5, [1] * 7])
  (unit,) = refilled.units(part, 0)
  value = unit.run()
  assert value['tokens'] == [[], []]
  assert value['seconds'] > 0


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'answer_limits': (3, 10)}, r'answer_limits is .* 1 to .* is 9'),
    ({'answer_limits': (0,)}, r'answer_limits is .* 1 to .* is 9'),
    ({'carry_policies': True}, r'refill and .*carry_policies are both'),
  ],
)
def test_settings_that_do_not_fit_are_refused(checkpoint, settings, message):
  with pytest.raises(ValueError, match=message):
    _evaluation(checkpoint, **settings)
