"""Rows follow their constraint, from its start to its end, with any draft."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.constraint import Constraint
from specsample.sampling import Sampling
from specsample.testing import grammar
from specsample.types import DraftKind, StopReason

_PARAMS = {'target': {}, 'drafter': {}}
_MODEL = testing.HashModel(vocab_size=3)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=3
)
_PROMPTS = [[1, 2, 0], [1], [2, 2], [0, 1, 0, 1], [2]]
_STARTS = np.asarray([0, 1, 2, 1, 0])


def _constrained(start=None):
  automaton = grammar.OneForbidden(3)
  constraint = Constraint(automaton=automaton, start=start)
  return Sampling(temperature=1.0, constraint=constraint)


def _assert_follows(tokens, start):
  state = start
  for token in np.asarray(tokens):
    assert token != state
    state = (2 * state + token) % 3


def test_tokens_are_those_of_plain_sampling_and_all_allowed():
  prompts, lengths = specsample.pad_prompts(_PROMPTS)
  run = {
    'model': _MODEL,
    'verify': verify.coupled,
    'sampling': _constrained(_STARTS),
    'max_new_tokens': 24,
  }
  arguments = (_PARAMS, prompts, lengths, jax.random.key(2))
  testing.assert_equals_plain_sampling(*arguments, drafter=_CHAIN, **run)
  output = specsample.generate(*arguments, drafter=_CHAIN, **run)
  assert output.accepted[:, 1:].sum() > 10
  for tokens, start in zip(output.tokens, _STARTS, strict=True):
    _assert_follows(tokens, start)


def test_a_refilled_row_begins_at_its_own_start():
  run = {
    'model': _MODEL,
    'drafter': _CHAIN,
    'verify': verify.chain,
    'sampling': _constrained(_STARTS),
    'max_new_tokens': np.asarray([24, 5, 9, 24, 20]),
  }
  key = jax.random.key(2)
  outputs = specsample.generate_all(_PARAMS, _PROMPTS, key, batch_size=2, **run)
  prompts, lengths = specsample.pad_prompts(_PROMPTS)
  expected = specsample.generate(_PARAMS, prompts, lengths, key, **run)
  for i, output in enumerate(outputs):
    found = output.tokens[0]
    np.testing.assert_array_equal(found, expected.tokens[i, : found.size])
    _assert_follows(found, _STARTS[i])


def test_each_turn_begins_at_the_start():
  prompts, lengths = specsample.pad_prompts(_PROMPTS[:2])
  decoder = specsample.Decoder(_MODEL, _CHAIN, verify.block)
  state = specsample.prefill(
    decoder,
    _PARAMS,
    prompts,
    lengths,
    jax.random.key(2),
    sampling=_constrained(_STARTS[:2]),
    max_new_tokens=16,
    max_length=128,
  )
  for turn in range(2):
    if turn:
      text = np.asarray([[0, 1], [2, 0]])
      state = specsample.extend(
        decoder, _PARAMS, state, text, [2, 1], max_new_tokens=16
      )
    # Rounds are run one by one, as for streaming.
    while not np.all(state.done):
      state = specsample.advance(decoder, _PARAMS, state, max_rounds=1)
    output = specsample.finish(state, max_new_tokens=16)
    assert output.lengths.tolist() == [16, 16]
    for tokens, start in zip(output.tokens, _STARTS[:2], strict=True):
      _assert_follows(tokens, start)


@dataclasses.dataclass(frozen=True)
class _EachOnce:
  """Forbids tokens that were emitted; the state says which were."""

  vocab_size: int

  def start(self):
    return {'seen': jnp.zeros(self.vocab_size, jnp.int32)}

  def advance(self, state, token):
    return {'seen': state['seen'].at[token].set(1)}

  def allowed(self, state):
    return state['seen'] == 0


_FIVE = testing.HashModel(vocab_size=5)
_CHAIN_OF_FIVE = drafters.Chain(
  model=dataclasses.replace(_FIVE, noise=0.5), num_draft_tokens=2
)
_TREE = drafters.Tree(
  drafter=_CHAIN_OF_FIVE,
  topology=tree.k_ary((2, 1)),
  kind=DraftKind.SAMPLED,
)
_NGRAM = drafters.Ngram(num_draft_tokens=3, min_ngram=1)


@pytest.mark.parametrize(
  ('drafter', 'rule', 'temperature'),
  [
    (drafters.NoDraft(), verify.chain, 0.0),
    (_CHAIN_OF_FIVE, verify.block, 1.0),
    (_NGRAM, verify.coupled, 1.0),
    (_TREE, verify.traversal, 1.0),
  ],
  ids=['NoDraft', 'Chain', 'Ngram', 'Tree'],
)
def test_a_row_stops_where_no_token_is_allowed(drafter, rule, temperature):
  seen = np.asarray([[0, 0, 0, 0, 0], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
  prompts, lengths = specsample.pad_prompts([[1, 2, 0, 1, 2]] * 3)
  output = specsample.generate(
    _PARAMS,
    prompts,
    lengths,
    jax.random.key(0),
    model=_FIVE,
    drafter=drafter,
    verify=rule,
    sampling=Sampling(
      temperature=temperature,
      constraint=Constraint(automaton=_EachOnce(5), start={'seen': seen}),
    ),
    max_new_tokens=9,
  )
  assert output.lengths.tolist() == [5, 1, 0]
  assert sorted(output.tokens[0, :5].tolist()) == [0, 1, 2, 3, 4]
  assert output.tokens[1, 0] == 2
  assert set(output.stop_reason.tolist()) == {StopReason.NO_TOKEN_ALLOWED}


def test_a_constraint_that_leaves_only_padding_is_no_distribution():
  seen = np.asarray([1, 1, 0, 0, 0])
  prompts, lengths = specsample.pad_prompts([[1]])
  output = specsample.generate(
    _PARAMS,
    prompts,
    lengths,
    jax.random.key(0),
    model=testing.HashModel(vocab_size=5, padding=3),
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    sampling=Sampling(
      constraint=Constraint(automaton=_EachOnce(5), start={'seen': seen})
    ),
    max_new_tokens=9,
  )
  assert output.lengths.tolist() == [0]
  assert output.stop_reason.tolist() == [StopReason.INVALID_LOGITS]
