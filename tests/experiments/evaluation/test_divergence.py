"""Audits of planted differences: near-tied logits and faults, in bfloat16."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation import audits
from experiments.evaluation import divergence
import specsample
from specsample import testing

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_COMMON = [5, 3, 5, 8, 9]
_WIDTH = 3  # does not divide the number of tokens fed
_BFLOAT16 = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')


@pytest.fixture(scope='module')
def params():
  return _BFLOAT16.init(jax.random.key(0))


def _logits(params, model=None):
  """Returns logits and hidden vector after the text, by one float32 pass."""
  model = dataclasses.replace(_BFLOAT16, dtype='float32')
  params = jax.tree.map(lambda x: x.astype('float32'), params)
  tokens = jnp.asarray([[*_PROMPT, *_COMMON]])
  output, _ = model.apply(params, tokens, model.init_cache(1, 0))
  return np.asarray(output.logits[0, -1]), np.asarray(output.hidden[0, -1])


def _ranked(params):
  return np.argsort(-_logits(params)[0]).tolist()


def _audit(params, token, baseline_token, model=_BFLOAT16, **changes):
  settings = {'width': _WIDTH, 'max_new_tokens': 8} | changes
  return divergence.audit(
    params, _PROMPT, _COMMON, token, baseline_token, model=model, **settings
  )


def _nearly_tied(params):
  """Returns parameters that make the two best tokens equal up to rounding."""
  logits, _ = _logits(params)
  best, second, *_ = _ranked(params)
  assert logits[second] > 0
  kernel = params['unembedding']
  scaled = kernel[:, second] * (logits[best] / logits[second])
  scaled = scaled.astype(kernel.dtype)
  return params | {'unembedding': kernel.at[:, second].set(scaled)}


def test_a_near_tie_is_one(params):
  tied = _nearly_tied(params)
  best, second, *_ = _ranked(tied)
  audit = _audit(tied, second, best)
  assert 0 < audit.float32.margin < audit.bound / 2
  assert audit.is_tie
  # Either of the two may be the baseline's.
  assert _audit(tied, best, second).is_tie


def test_another_token_is_none(params):
  best, *_, last = _ranked(params)
  audit = _audit(params, last, best)
  assert audit.float32.lead > audit.bound
  assert not audit.is_tie
  # Two unlikely tokens can be tied without either being a tie for the best.
  *_, before, last = _ranked(params)
  assert not _audit(params, last, before).is_tie


def test_the_same_difference_is_larger_than_float32_moves(params):
  tied = _nearly_tied(params)
  best, second, *_ = _ranked(tied)
  model = dataclasses.replace(_BFLOAT16, dtype='float32')
  exact = jax.tree.map(lambda x: x.astype('float32'), tied)
  audit = _audit(exact, second, best, model)
  assert audit.float32.margin > audit.bound
  assert not audit.is_tie


def test_readings_are_those_of_one_pass_over_all(params):
  logits, _ = _logits(params)
  best, second, third, *_ = _ranked(params)
  audit = _audit(params, third, best)
  for reading, tolerance in (
    (audit.float32, 1e-5),
    # Logits are about 1; weights and vectors have 8 bits of precision.
    (audit.one_token, 0.1),
    (audit.block, 0.1),
  ):
    assert (reading.best, reading.second) == (best, second)
    margin, lead = logits[best] - logits[second], logits[best] - logits[third]
    assert reading.margin == pytest.approx(margin, abs=tolerance)
    assert reading.lead == pytest.approx(lead, abs=tolerance)


@pytest.mark.parametrize(
  ('width', 'starts'), [(1, ()), (5, ()), (3, (0, 1, 4)), (4, (0, 4, 5))]
)
def test_passes_may_be_of_any_width_and_rounds(params, width, starts):
  model = dataclasses.replace(_BFLOAT16, dtype='float32')
  exact = jax.tree.map(lambda x: x.astype('float32'), params)
  best, second, *_ = _ranked(params)
  audit = _audit(
    exact, second, best, model, width=width, starts=starts, batch_size=2
  )
  assert audit.block.lead == pytest.approx(audit.float32.lead, abs=1e-5)
  assert audit.one_token.lead == pytest.approx(audit.float32.lead, abs=1e-5)


def test_the_bound_is_that_of_the_formula(params):
  _, hidden = _logits(params)
  best, second, *_ = _ranked(params)
  kernel = np.asarray(params['unembedding'], np.float32)
  moved = hidden * (kernel[:, best] - kernel[:, second])
  # Two layers: four residual sums, the embedding and the last norm's scale.
  expected = 5 * 2**-8 * np.sqrt(6 * np.sum(moved**2)) + 1e-4
  assert _audit(params, second, best).bound == pytest.approx(expected, rel=1e-4)


def _penalised(kind, logits, bias):
  """Returns settings that tie the two tokens of `bias`, far above the others.

  The first of the two has been emitted, the second has not.
  """
  first, second = np.flatnonzero(bias)
  gap = logits[first] - logits[second]
  count = _COMMON.count(first)
  bias = bias.copy()
  settings = {
    'presence_penalty': gap,
    'frequency_penalty': gap / count,
    'repetition_penalty': (logits[first] + bias[first])
    / (logits[second] + bias[second]),
  }
  if kind == 'logit_bias':
    bias[second] += gap
    return specsample.Sampling(logit_bias=bias)
  return specsample.Sampling(**{kind: settings[kind]}, logit_bias=bias)


@pytest.mark.parametrize(
  'kind',
  [
    *('logit_bias', 'presence_penalty', 'frequency_penalty'),
    'repetition_penalty',
  ],
)
def test_what_is_tied_is_what_penalties_and_biases_leave(params, kind):
  model = dataclasses.replace(_BFLOAT16, dtype='float32')
  exact = jax.tree.map(lambda x: x.astype('float32'), params)
  logits, _ = _logits(params)
  # Only the first token was emitted.
  pairs = [
    (first, second)
    for first in sorted({*_COMMON})
    for second in range(logits.size)
    if first < second
    and second not in (*_PROMPT, *_COMMON)
    and abs(logits[first] - logits[second]) > 0.1
  ]
  first, second = pairs[0]
  bias = np.zeros(logits.size, np.float32)
  bias[[first, second]] = 50
  sampling = _penalised(kind, logits, bias)
  audit = _audit(exact, first, second, model, sampling=sampling)
  assert audit.is_tie
  assert {audit.float32.best, audit.float32.second} == {first, second}
  assert abs(audit.float32.lead) < audit.bound
  for reading in (audit.one_token, audit.block):
    assert reading.lead == pytest.approx(audit.float32.lead, abs=1e-5)
  # Without these settings, or with others, the same tokens are not tied.
  assert not _audit(exact, first, second, model).is_tie
  only = specsample.Sampling(logit_bias=bias)
  audit = _audit(exact, first, second, model, sampling=only)
  assert not audit.is_tie
  gap = logits[second] - logits[first]
  assert audit.float32.lead == pytest.approx(gap, abs=1e-5)


def test_the_bound_is_of_logits_that_were_divided(params):
  logits, hidden = _logits(params)
  best = max(_COMMON, key=lambda token: logits[token])
  second = next(x for x in _ranked(params) if x not in (*_PROMPT, *_COMMON))
  assert logits[best] > 0
  bias = np.zeros(logits.size, np.float32)
  bias[[best, second]] = 90, 50
  sampling = specsample.Sampling(repetition_penalty=1.5, logit_bias=bias)
  kernel = np.asarray(params['unembedding'], np.float32)
  moved = hidden * (kernel[:, best] / 1.5 - kernel[:, second])
  expected = 5 * 2**-8 * np.sqrt(6 * np.sum(moved**2)) + 1e-4
  audit = _audit(params, second, best, sampling=sampling)
  assert audit.bound == pytest.approx(expected, rel=1e-4)
  margin = (logits[best] + 90) / 1.5 - (logits[second] + 50)
  assert audit.float32.margin == pytest.approx(margin, abs=1e-4)


def test_a_token_that_is_forbidden_is_no_tie(params):
  best, second, *_ = _ranked(params)
  bias = np.zeros(_logits(params)[0].size, np.float32)
  bias[second] = -np.inf
  sampling = specsample.Sampling(logit_bias=bias)
  audit = _audit(_nearly_tied(params), second, best, sampling=sampling)
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
def test_a_token_is_no_tie_where_a_constraint_forbids_it(params, text):
  best, second, *_ = _ranked(params)
  automaton = _ForbidsAfter(tuple(text), second, _BFLOAT16.vocab_size)
  sampling = specsample.Sampling(
    constraint=specsample.Constraint(automaton=automaton)
  )
  audit = _audit(_nearly_tied(params), second, best, sampling=sampling)
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
