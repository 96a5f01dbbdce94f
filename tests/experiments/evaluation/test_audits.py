"""From made-up generations to the audit of their differences."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import evaluation
from experiments.evaluation import table
from experiments.reporting import rows
import specsample
from specsample import stats
from specsample import testing

_PROMPTS = [[3, 1, 4], [1, 5]]
_OUTPUT = [9, 2, 6, 5, 3, 5]


@pytest.fixture(scope='module')
def evaluated(smollm2):
  """Two methods and a baseline in bfloat16; SmolLM2 lends its tokenizer."""
  model = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')
  params = model.init(jax.random.key(0))
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  return evaluation.Evaluation(
    target=specsample.Loaded(model, params, smollm2.tokenizer),
    methods={
      methods.BASELINE: methods.Method(specsample.drafters.NoDraft()),
      'ngram': methods.Method(ngram),
      'lossy': methods.Method(ngram, specsample.verify.Typical()),
    },
    max_new_tokens=len(_OUTPUT),
  )


def _journal(folder, outputs):
  """Writes an evaluation's journal, given each method's output per prompt."""
  journal = journal_lib.Journal(folder, {})
  for method, of_prompts in outputs.items():
    times = {'draft_ms': 1.0, 'overhead_ms': {'0': 1.0}, 'kind': 'point_mass'}
    journal.add(('parts', method, 0), times)
    for i, tokens in enumerate(of_prompts):
      generation = rows.Generation(
        batch=i,
        category='a',
        prompt_tokens=len(_PROMPTS[i]),
        tokens=tokens,
        log_probs=[-1.0] * len(tokens),
        seconds=1.0,
        stats=stats.Stats(len(tokens), 3, (0, 3), (0, 3)),
        prompt=i,
      )
      value = {'generations': [generation.to_json()]}
      journal.add(('generation', method, i), value)
  journal.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  return journal


def _part(evaluated, journal):
  return evaluation.Part(evaluation=evaluated, tokens=_PROMPTS, journal=journal)


def _units(evaluated, journal):
  part = _part(evaluated, journal)
  return list(audits.units(part, [conversations.turn(part, 0)]))


def _best_and_last(evaluated, tokens):
  model, params = evaluated.target.model, evaluated.target.params
  output, _ = model.apply(params, np.asarray([tokens]), model.init_cache(1, 0))
  order = np.argsort(-np.asarray(output.logits[0, -1]))
  return int(order[0]), int(order[-1])


def test_a_fault_and_an_early_end_differ(evaluated, tmp_path):
  common = _OUTPUT[:2]
  best, last = _best_and_last(evaluated, [*_PROMPTS[0], *common])
  baseline = [[*common, best, 0, 0, 0], _OUTPUT]
  outputs = [[*common, last, 1, 1, 1], _OUTPUT[:4]]
  journal = _journal(
    tmp_path,
    {methods.BASELINE: baseline, 'ngram': outputs, 'lossy': outputs},
  )
  units = _units(evaluated, journal)
  # A lossy method is expected to give other tokens.
  assert [unit.key for unit in units] == [
    (audits.KIND, 'ngram', 0),
    (audits.KIND, 'ngram', 1),
  ]
  for unit in units:
    journal.add(unit.key, unit.run())

  fault, ended = journal.of(audits.KIND)
  assert (fault['prompt'], fault['position'], fault['width']) == (1, 2, 3)
  assert (fault['token'], fault['baseline_token']) == (last, best)
  text = evaluated.target.tokenizer.decode([best], skip_special=False)
  assert fault['baseline_text'] == text
  assert fault['verdict'] == 'DIFFERS'
  for name in ('one_token', 'block', 'float32'):
    assert fault['audit'][name]['best'] == best
    assert fault['audit'][name]['lead'] > fault['audit']['bound']
  assert (ended['prompt'], ended['position']) == (2, 4)
  assert (ended['token'], ended['text']) == (-1, None)
  assert (ended['verdict'], ended['audit']) == ('DIFFERS', None)

  found = table.Table.of(_part(evaluated, journal))
  assert found.mismatches == {'ngram': rows.Mismatches(ties=0, errors=2)}
  first, second = audits.lines(found.divergences)
  assert 'ngram, prompt 1, token 2:' in first and 'DIFFERS' in first
  assert 'one output ended there (DIFFERS)' in second


def test_a_tie_is_no_fault(evaluated, tmp_path):
  # Two tokens with equal weights are equally likely.
  params = dict(evaluated.target.params)
  best, last = _best_and_last(evaluated, _PROMPTS[0])
  kernel = params['unembedding']
  params['unembedding'] = kernel.at[:, last].set(kernel[:, best])
  target = dataclasses.replace(evaluated.target, params=params)
  tied = dataclasses.replace(evaluated, target=target)
  journal = _journal(
    tmp_path,
    {
      methods.BASELINE: [[best, *_OUTPUT], _OUTPUT],
      'ngram': [[last, *_OUTPUT], _OUTPUT],
      'lossy': [_OUTPUT, _OUTPUT],
    },
  )
  (unit,) = _units(tied, journal)
  journal.add(unit.key, unit.run())
  (found,) = journal.of(audits.KIND)
  assert (found['position'], found['verdict']) == (0, 'tie')
  mismatches = table.Table.of(_part(tied, journal)).mismatches
  assert mismatches == {'ngram': rows.Mismatches(ties=1, errors=0)}


@pytest.mark.parametrize(
  ('penalty', 'verdict'), [(0.0, 'tie'), (5.0, 'DIFFERS')]
)
def test_penalties_are_part_of_what_is_audited(
  evaluated, tmp_path, penalty, verdict
):
  # Two tokens with equal weights, which the bias puts above all others.
  params = dict(evaluated.target.params)
  kernel = params['unembedding']
  params['unembedding'] = kernel.at[:, 8].set(kernel[:, 7])
  bias = np.zeros(kernel.shape[1], np.float32)
  bias[[7, 8]] = 50
  penalised = dataclasses.replace(
    evaluated,
    target=dataclasses.replace(evaluated.target, params=params),
    sampling=specsample.Sampling(presence_penalty=penalty, logit_bias=bias),
  )
  outputs = {
    methods.BASELINE: [[7, 8, *_OUTPUT[2:]], _OUTPUT],
    # 7 is emitted again, although it is penalised.
    'ngram': [[7, 7, *_OUTPUT[2:]], _OUTPUT],
    'lossy': [_OUTPUT, _OUTPUT],
  }
  journal = _journal(tmp_path, outputs)
  (unit,) = _units(penalised, journal)
  journal.add(unit.key, unit.run())
  (found,) = journal.of(audits.KIND)
  assert found['verdict'] == verdict
  assert found['audit']['float32']['lead'] == pytest.approx(penalty, abs=1e-4)


def test_what_no_audit_looked_into_is_no_tie(evaluated, tmp_path):
  outputs = {name: [_OUTPUT, _OUTPUT] for name in evaluated.methods}
  outputs['ngram'] = [_OUTPUT, _OUTPUT[::-1]]
  journal = _journal(tmp_path, outputs)
  mismatches = table.Table.of(_part(evaluated, journal)).mismatches
  found = mismatches['ngram']
  assert found == rows.Mismatches(ties=0, errors=0, unaudited=1)
  assert found.not_ties == 1


def test_an_audit_without_room_leaves_the_rest(evaluated, tmp_path):
  class TooLarge:
    def __getattr__(self, name):
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: no room\nmore')

  target = dataclasses.replace(evaluated.target, params=TooLarge())
  outputs = {name: [_OUTPUT, _OUTPUT] for name in evaluated.methods}
  outputs['ngram'] = [_OUTPUT, _OUTPUT[::-1]]
  journal = _journal(tmp_path, outputs)
  too_large = dataclasses.replace(evaluated, target=target)
  (unit,) = _units(too_large, journal)
  assert unit.run() is None


def test_equal_outputs_leave_nothing_to_do(evaluated, tmp_path):
  outputs = {name: [_OUTPUT, _OUTPUT] for name in evaluated.methods}
  journal = _journal(tmp_path, outputs)
  assert _units(evaluated, journal) == []


def test_what_is_drawn_is_not_compared(evaluated, tmp_path):
  drawn = dataclasses.replace(
    evaluated, sampling=specsample.Sampling(temperature=1.0)
  )
  outputs = {name: [_OUTPUT, _OUTPUT] for name in evaluated.methods}
  outputs['ngram'] = [_OUTPUT, _OUTPUT[::-1]]
  journal = _journal(tmp_path, outputs)
  assert _units(drawn, journal) == []
  assert len(_units(evaluated, journal)) == 1


def test_few_of_many_are_shown_faults_first():
  ended = {
    'method': 'ngram',
    'turn': 1,
    'position': 7,
    'text': 'a',
    'baseline_text': None,
    'audit': None,
  }
  many = [
    ended | {'prompt': i, 'verdict': 'DIFFERS' if i == 4 else 'tie'}
    for i in range(1, 6)
  ]
  lines = audits.lines(many)
  assert [line.split(':')[0] for line in lines] == [
    '  ngram, prompt 4, token 7',
    '  ngram, prompt 1, token 7',
    '  ngram, prompt 2, token 7',
    '  2 more of ngram in result.json',
  ]
