"""Audits of planted differences, ties and faults, in bfloat16."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.evaluation import audits
from experiments.evaluation import conversations
from experiments.evaluation import decoding
from experiments.evaluation import divergence
from experiments.evaluation import evaluation
from experiments.evaluation import table
from experiments.reporting import rows
import specsample
from specsample import testing
from tests.experiments.evaluation import made_up

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_COMMON = [5, 3, 5, 8, 9]
_UNUSED = (*_PROMPT, *_COMMON)
_WIDTH = 3  # does not divide the number of tokens fed
_BFLOAT16 = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')
_FLOAT32 = testing.tiny_llama()


@pytest.fixture(scope='module')
def params():
  return _BFLOAT16.init(jax.random.key(0))


def _exact(params):
  return jax.tree.map(lambda x: x.astype('float32'), params)


def _logits(params):
  """Returns logits and hidden vector after the text, by one float32 pass."""
  tokens = jnp.asarray([[*_PROMPT, *_COMMON]])
  empty = _FLOAT32.init_cache(1, 0)
  output, _ = _FLOAT32.apply(_exact(params), tokens, empty)
  return np.asarray(output.logits[0, -1]), np.asarray(output.hidden[0, -1])


def _ranked(params):
  return np.argsort(-_logits(params)[0]).tolist()


def _audit(params, token, baseline_token, model=_BFLOAT16, **changes):
  settings = {'width': _WIDTH, 'max_new_tokens': 8} | changes
  return divergence.audit(
    params, _PROMPT, _COMMON, token, baseline_token, model=model, **settings
  )


def _biased(tokens, size, **settings):
  """Returns settings that put some tokens above all others."""
  bias = np.zeros(_BFLOAT16.vocab_size, np.float32)
  bias[list(tokens)] = size
  return specsample.Sampling(logit_bias=bias, **settings)


@pytest.fixture(scope='module')
def tied(params):
  """Parameters that make the two best tokens equal up to rounding."""
  logits, _ = _logits(params)
  best, second, *_ = _ranked(params)
  assert logits[second] > 0
  kernel = params['unembedding']
  scaled = kernel[:, second] * (logits[best] / logits[second])
  scaled = scaled.astype(kernel.dtype)
  return params | {'unembedding': kernel.at[:, second].set(scaled)}


@pytest.mark.slow
def test_near_tie_is_a_tie_in_bfloat16_alone(tied):
  best, second, *_ = _ranked(tied)
  audit = _audit(tied, second, best)
  assert 0 < audit.float32.margin < audit.bound / 2
  assert audit.is_tie
  # Either of the two may be the baseline's.
  assert _audit(tied, best, second).is_tie
  # The same difference is larger than float32 moves.
  audit = _audit(_exact(tied), second, best, _FLOAT32)
  assert audit.float32.margin > audit.bound
  assert not audit.is_tie


def test_other_tokens_are_no_tie(params):
  best, *_, before, last = _ranked(params)
  audit = _audit(params, last, best)
  assert audit.float32.lead > audit.bound
  assert not audit.is_tie
  # Two unlikely tokens can be tied without either being a tie for the best.
  assert not _audit(params, last, before).is_tie


def test_readings_are_those_of_one_pass_over_all(params):
  logits, _ = _logits(params)
  best, second, third, *_ = _ranked(params)
  margin, lead = logits[best] - logits[second], logits[best] - logits[third]
  audit = _audit(params, third, best)
  # Logits are about 1; weights and vectors have 8 bits of precision.
  for name, error in (('float32', 1e-5), ('one_token', 0.1), ('block', 0.1)):
    reading = getattr(audit, name)
    assert (reading.best, reading.second) == (best, second)
    assert reading.margin == pytest.approx(margin, abs=error)
    assert reading.lead == pytest.approx(lead, abs=error)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('width', 'starts'), [(1, ()), (5, ()), (3, (0, 1, 4)), (4, (0, 4, 5))]
)
def test_passes_may_be_of_any_width_and_rounds(params, width, starts):
  best, second, *_ = _ranked(params)
  settings = {'width': width, 'starts': starts, 'batch_size': 2}
  audit = _audit(_exact(params), second, best, _FLOAT32, **settings)
  assert audit.block.lead == pytest.approx(audit.float32.lead, abs=1e-5)
  assert audit.one_token.lead == pytest.approx(audit.float32.lead, abs=1e-5)


@pytest.mark.parametrize('penalty', [1.0, 1.5])
def test_bound_is_that_of_the_formula(params, penalty):
  logits, hidden = _logits(params)
  best = max(_COMMON, key=lambda token: logits[token])
  second = next(x for x in _ranked(params) if x not in _UNUSED)
  assert logits[best] > 0
  sampling = _biased([best, second], (90, 50), repetition_penalty=penalty)
  kernel = np.asarray(params['unembedding'], np.float32)
  moved = hidden * (kernel[:, best] / penalty - kernel[:, second])
  # Two layers: four residual sums, the embedding and the last norm's scale.
  expected = 5 * 2**-8 * np.sqrt(6 * np.sum(moved**2)) + 1e-4
  audit = _audit(params, second, best, sampling=sampling)
  assert audit.bound == pytest.approx(expected, rel=1e-4)
  margin = (logits[best] + 90) / penalty - (logits[second] + 50)
  assert audit.float32.margin == pytest.approx(margin, abs=1e-4)


@pytest.mark.parametrize('by', ['bias', 'presence', 'frequency', 'repetition'])
def test_what_penalties_and_biases_leave_is_tied(params, by):
  exact = _exact(params)
  logits, _ = _logits(params)
  # Only the first token was emitted.
  first, second = next(
    (first, second)
    for first in sorted({*_COMMON})
    for second in range(first + 1, logits.size)
    if second not in _UNUSED and abs(logits[first] - logits[second]) > 0.1
  )
  gap = logits[first] - logits[second]
  biased = lambda bias=50, **settings: _biased(
    [first, second], bias, **settings
  )
  only = biased()
  ratio = (logits[first] + 50) / (logits[second] + 50)
  sampling = {
    'bias': biased((50, 50 + gap)),
    'presence': biased(presence_penalty=gap),
    'frequency': biased(frequency_penalty=gap / _COMMON.count(first)),
    'repetition': biased(repetition_penalty=ratio),
  }[by]
  audit = _audit(exact, first, second, _FLOAT32, sampling=sampling)
  assert audit.is_tie
  assert {audit.float32.best, audit.float32.second} == {first, second}
  assert abs(audit.float32.lead) < audit.bound
  for reading in (audit.one_token, audit.block):
    assert reading.lead == pytest.approx(audit.float32.lead, abs=1e-5)
  # Without these settings, or with others, the same tokens are not tied.
  assert not _audit(exact, first, second, _FLOAT32).is_tie
  audit = _audit(exact, first, second, _FLOAT32, sampling=only)
  assert not audit.is_tie
  assert audit.float32.lead == pytest.approx(-gap, abs=1e-5)


def test_forbidden_token_is_no_tie(tied):
  best, second, *_ = _ranked(tied)
  sampling = _biased([second], -np.inf)
  audit = _audit(tied, second, best, sampling=sampling)
  assert not audit.is_tie
  json.dumps(dataclasses.asdict(audit), allow_nan=False)


@dataclasses.dataclass(frozen=True)
class _ForbidsAfter:
  """Forbids one token after a text of some last tokens."""

  text: tuple[int, ...]
  token: int
  vocab_size: int

  def start(self):
    return np.full(len(self.text), -1)

  def advance(self, state, token):
    return jnp.append(state[1:], token)

  def allowed(self, state):
    is_token = jnp.arange(self.vocab_size) == self.token
    return ~(is_token & jnp.all(state == jnp.asarray(self.text)))


@pytest.mark.parametrize('text', [_COMMON[-3:], _COMMON[:3]])
def test_token_is_no_tie_where_a_constraint_forbids_it(tied, text):
  best, second, *_ = _ranked(tied)
  automaton = _ForbidsAfter(tuple(text), second, _BFLOAT16.vocab_size)
  constraint = specsample.Constraint(automaton=automaton)
  sampling = specsample.Sampling(constraint=constraint)
  audit = _audit(tied, second, best, sampling=sampling)
  assert audit.is_tie == (text == _COMMON[:3])


@pytest.mark.parametrize(
  ('tokens', 'baseline', 'expected'),
  [
    ([1, 2, 3], [1, 2, 3], None),
    ([], [], None),
    ([1, 7, 3], [1, 2, 3], 1),
    ([1, 2], [1, 2, 3], 2),
    ([1, 2, 3], [1], 1),
  ],
)
def test_first_difference(tokens, baseline, expected):
  found = [x.common for x in audits.differences([tokens], [baseline])]
  assert found == ([] if expected is None else [tokens[:expected]])


# From made-up generations to the audits of their differences.
_PROMPTS = [[3, 1, 4], [1, 5]]
_OUTPUT = [9, 2, 6, 5, 3, 5]


@pytest.fixture(scope='module')
def evaluated(params, checkpoint):
  """Two methods and a baseline in bfloat16."""
  tokenizer = specsample.load(checkpoint).tokenizer
  ngram = specsample.drafters.Ngram(num_draft_tokens=2)
  return evaluation.Evaluation(
    target=specsample.Loaded(_BFLOAT16, params, tokenizer),
    methods={
      methods.BASELINE: methods.Method(specsample.drafters.NoDraft()),
      'ngram': methods.Method(ngram),
      'lossy': methods.Method(ngram, specsample.verify.Typical()),
    },
    max_new_tokens=len(_OUTPUT),
  )


def _part(evaluated, folder, **outputs):
  """Returns a finished run, given outputs that differ from the usual ones."""
  folder.mkdir(exist_ok=True)
  journal = journal_lib.Journal(folder, {})
  for method in evaluated.methods:
    times = {'draft_ms': 1.0, 'overhead_ms': {'0': 1.0}, 'kind': 'point_mass'}
    journal.add(('parts', method, 0), times)
    for i, tokens in enumerate(outputs.get(method, [_OUTPUT, _OUTPUT])):
      run = made_up.generation(tokens, batch=i, prompt=i)
      value = {'generations': [run.to_json()]}
      journal.add(('generation', method, i), value)
  journal.add((decoding.MEMORY, 0), {'bytes_per_second': 1.0})
  return evaluation.Part(evaluation=evaluated, tokens=_PROMPTS, journal=journal)


def _units(part):
  return list(audits.units(part, [conversations.turn(part, 0)]))


@pytest.mark.slow
def test_fault_and_early_end_differ(evaluated, tmp_path):
  common, model = _OUTPUT[:2], evaluated.target.model
  read, empty = np.asarray([[*_PROMPTS[0], *common]]), model.init_cache(1, 0)
  output, _ = model.apply(evaluated.target.params, read, empty)
  order = np.argsort(-np.asarray(output.logits[0, -1]))
  best, last = int(order[0]), int(order[-1])
  outputs = [[*common, last, 1, 1, 1], _OUTPUT[:4]]
  part = _part(
    evaluated,
    tmp_path,
    autoregressive=[[*common, best, 0, 0, 0], _OUTPUT],
    ngram=outputs,
    lossy=outputs,
  )
  units = _units(part)
  # A lossy method is expected to give other tokens.
  assert [unit.key for unit in units] == [
    (audits.KIND, 'ngram', 0),
    (audits.KIND, 'ngram', 1),
  ]
  for unit in units:
    part.journal.add(unit.key, unit.run())

  fault, ended = part.journal.of(audits.KIND)
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

  found = table.Table.of(part)
  assert found.mismatches == {'ngram': rows.Mismatches(ties=0, errors=2)}
  first, second = audits.lines(found.divergences)
  assert 'ngram, prompt 1, token 2:' in first and 'DIFFERS' in first
  assert 'one output ended there (DIFFERS)' in second


@pytest.mark.slow(but=('5.0-DIFFERS-expected1',))
@pytest.mark.parametrize(
  ('penalty', 'verdict', 'expected'),
  [
    (0.0, 'tie', rows.Mismatches(ties=1, errors=0)),
    (5.0, 'DIFFERS', rows.Mismatches(ties=0, errors=1)),
  ],
)
def test_penalties_are_part_of_what_is_audited(
  evaluated, tmp_path, penalty, verdict, expected
):
  # Two tokens with equal weights, which the bias puts above all others.
  params = dict(evaluated.target.params)
  kernel = params['unembedding']
  params['unembedding'] = kernel.at[:, 8].set(kernel[:, 7])
  penalised = dataclasses.replace(
    evaluated,
    target=dataclasses.replace(evaluated.target, params=params),
    sampling=_biased([7, 8], 50, presence_penalty=penalty),
  )
  part = _part(
    penalised,
    tmp_path,
    autoregressive=[[7, 8, *_OUTPUT[2:]], _OUTPUT],
    # 7 is emitted again, although it is penalised.
    ngram=[[7, 7, *_OUTPUT[2:]], _OUTPUT],
  )
  (unit,) = _units(part)
  part.journal.add(unit.key, found := unit.run())
  assert (found['position'], found['verdict']) == (1, verdict)
  assert found['audit']['float32']['lead'] == pytest.approx(penalty, abs=1e-4)
  assert table.Table.of(part).mismatches == {'ngram': expected}


def test_difference_that_was_not_audited_is_no_tie(evaluated, tmp_path):
  part = _part(evaluated, tmp_path, ngram=[_OUTPUT, _OUTPUT[::-1]])
  found = table.Table.of(part).mismatches['ngram']
  assert found == rows.Mismatches(ties=0, errors=0, unaudited=1)
  assert found.not_ties == 1


def test_audit_without_room_leaves_the_rest(evaluated, tmp_path):
  class TooLarge:
    def __getattr__(self, name):
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: no room\nmore')

  target = dataclasses.replace(evaluated.target, params=TooLarge())
  too_large = dataclasses.replace(evaluated, target=target)
  part = _part(too_large, tmp_path, ngram=[_OUTPUT, _OUTPUT[::-1]])
  (unit,) = _units(part)
  assert unit.run() is None


def test_equal_and_drawn_outputs_are_not_audited(evaluated, tmp_path):
  assert _units(_part(evaluated, tmp_path / 'equal')) == []
  drawn = dataclasses.replace(
    evaluated, sampling=specsample.Sampling(temperature=1.0)
  )
  other = {'ngram': [_OUTPUT, _OUTPUT[::-1]]}
  assert _units(_part(drawn, tmp_path / 'drawn', **other)) == []
  assert len(_units(_part(evaluated, tmp_path / 'greedy', **other))) == 1


def test_few_of_many_are_shown_faults_first():
  ended = {'method': 'ngram', 'turn': 1, 'position': 7, 'text': 'a'}
  ended |= {'baseline_text': None, 'audit': None}
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
