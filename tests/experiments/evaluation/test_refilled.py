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
from specsample import stats
from specsample import testing
from specsample.testing import hash_model

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
  lines = (folder / 'journal.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


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
  entries = _entries(tmp_path)
  values = {tuple(one['key']): one['value'] for one in entries[1:]}
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
  again = {tuple(one['key']): one['value'] for one in _entries(tmp_path)[1:]}
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
      rows_lib.Generation(
        batch=0,
        category='',
        prompt_tokens=len(prompt),
        tokens=tokens,
        log_probs=[],
        seconds=1.0,
        stats=stats.Stats(len(tokens), 3, (0, 3), (0, 3)),
        prompt=i,
      ).to_json()
      for i, (prompt, tokens) in enumerate(zip(_PROMPTS, of_batch, strict=True))
    ]
    journal.add(('generation', name, 0), {'generations': generations})
    for repeat, seconds in enumerate((1.0, 2.0)):
      value = {'seconds': seconds, 'tokens': again}
      journal.add((refilled.KIND, name, repeat), value)
  return evaluation, journal


def _part(evaluation, journal):
  return evaluation_lib.Part(
    evaluation=evaluation, tokens=_PROMPTS, journal=journal
  )


def _table(evaluation, journal):
  return table_lib.Table.of(_part(evaluation, journal))


def test_differences_are_audited(in_bfloat16, tmp_path):
  evaluation, journal = _decoded(tmp_path, in_bfloat16)
  part = _part(evaluation, journal)
  tie, fault = audits.units(part, [conversations.turn(part, 0)])
  # A lossy rule may emit other tokens than the most likely ones.
  assert tie.key == (audits.KIND, 'ngram, refilled', 1)
  assert fault.key == (audits.KIND, 'ngram, refilled', 2)
  journal.add(tie.key, tie.run())
  found = _table(evaluation, journal).refilled_mismatches
  assert found['ngram, refilled'] == rows_lib.Mismatches(1, 0, 1)
  assert found['lossy, refilled'] == rows_lib.Mismatches(0, 0, 2)
  journal.add(fault.key, fault.run())
  table = _table(evaluation, journal)
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


def test_what_is_drawn_is_not_audited(in_bfloat16, tmp_path):
  evaluation, journal = _decoded(tmp_path, in_bfloat16, temperature=1.0)
  part = _part(evaluation, journal)
  assert not list(audits.units(part, [conversations.turn(part, 0)]))
  row, *_ = _table(evaluation, journal).rows
  assert row.refilled_differing == 2


def _evaluation(checkpoint, model, **kwargs):
  """Returns an evaluation of answers of 1 or 9 tokens, in refilled rows."""
  target = specsample.Loaded(model, {}, specsample.load(checkpoint).tokenizer)
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  return evaluation_lib.Evaluation(
    **{
      'target': target,
      'methods': {'ngram': methods.Method(ngram)},
      'max_new_tokens': 9,
      'answer_limits': (1, 9),
      'refill': True,
      'repeats': 0,
    }
    | kwargs
  )


# With one row, there are fewer rows than prefill sizes; with nine, more rows
# than prompts.
@pytest.mark.nightly(but=('3',))
@pytest.mark.parametrize('batch_size', [1, 3, 9])
def test_nothing_is_compiled_while_it_is_timed(
  checkpoint, num_compiled, tmp_path, batch_size
):
  model = hash_model.HashModel(vocab_size=16, seed=batch_size)
  sampling = specsample.Sampling(temperature=1.0)
  evaluation = _evaluation(
    checkpoint, model, batch_size=batch_size, sampling=sampling
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
  model = hash_model.HashModel(vocab_size=16, scale=float('nan'))
  evaluation = _evaluation(checkpoint, model, batch_size=2)
  tokens = [[1] * 5, [1] * 7]
  part = evaluation_lib.Part(evaluation=evaluation, tokens=tokens)
  (unit,) = refilled.units(part, 0)
  value = unit.run()
  assert value['tokens'] == [[], []]
  assert value['seconds'] > 0


def test_limits_are_within_the_most_tokens(checkpoint):
  model = hash_model.HashModel(vocab_size=16)
  for limits in ((3, 10), (0,)):
    with pytest.raises(ValueError, match=r'answer_limits is .* 1 to .* is 9'):
      _evaluation(checkpoint, model, answer_limits=limits)


def test_carried_policies_are_refused(checkpoint):
  model = hash_model.HashModel(vocab_size=16)
  with pytest.raises(ValueError, match=r'refill and .*carry_policies are both'):
    _evaluation(checkpoint, model, carry_policies=True)


@pytest.mark.parametrize(
  ('name', 'settings'),
  [('refill', {'answer_limits': ()}), ('answer_limits', {'refill': False})],
)
def test_several_turns_are_refused(checkpoint, name, settings):
  model = hash_model.HashModel(vocab_size=16)
  evaluation = _evaluation(checkpoint, model, **settings)
  prompt = prompts_lib.Prompt('0', '', 'One.', 4, next_turns=('Two.',))
  message = rf'a.jsonl, line 4: 2 turns .*Evaluation.{name} is .*max_turns = 1'
  with pytest.raises(ValueError, match=message):
    conversations.check(evaluation, 'a.jsonl', prompt)
  first = dataclasses.replace(evaluation, max_turns=1)
  conversations.check(first, 'a.jsonl', prompt)
