"""Constraints: in `warp`, in the loop, what is refused, and the example."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specsample
from specsample import drafters
from specsample import sampling as sampling_lib
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.constraint import Constraint
from specsample.sampling import Sampling
from specsample.testing import grammar
from specsample.text import tokenizer as tokenizer_lib
from specsample.types import DraftKind, StopReason
from tests.loop import scene

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _warp(drafted, start=0, **settings):
  constraint = Constraint(automaton=grammar.OneForbidden(3), start=start)
  sampling = Sampling(temperature=1.0, constraint=constraint, **settings)
  rows = sampling_lib.per_row(sampling, 1, 3)
  row = jax.tree.map(lambda leaf: leaf[0], rows)
  logits = jnp.log(jnp.asarray([0.2, 0.3, 0.5]))
  return sampling_lib.warp(row, None, logits, jnp.asarray(drafted, jnp.int32))


def test_the_mask_is_that_after_the_drafted_tokens_in_order():
  np.testing.assert_allclose(_warp([]), [0, 3 / 8, 5 / 8], rtol=1e-6)
  # From 0 by 1 to state 1, and by 2 to 2 + 2 = 1 modulo 3.
  np.testing.assert_allclose(_warp([1, -1, 2]), [2 / 7, 0, 5 / 7], rtol=1e-6)
  # From 0 by 2 to state 2, and by 1 to 4 + 1 = 2 modulo 3.
  np.testing.assert_allclose(_warp([2, 1]), [2 / 5, 3 / 5, 0], rtol=1e-6)


def test_filters_choose_among_the_allowed_tokens():
  np.testing.assert_allclose(_warp([], start=2, top_k=1), [0, 1, 0])


@dataclasses.dataclass(frozen=True)
class _Broken(grammar.OneForbidden):
  mask: object = None
  state: object = None

  def allowed(self, state):
    return super().allowed(state) if self.mask is None else self.mask(state)

  def advance(self, state, token):
    return token if self.state is None else self.state(token)


@dataclasses.dataclass(frozen=True)
class _Array(grammar.OneForbidden):
  table: np.ndarray


_CONSTRAINT = Constraint(automaton=grammar.OneForbidden(3))


@pytest.mark.parametrize(
  ('constraint', 'error', 'message'),
  [
    (
      Constraint(automaton=grammar.OneForbidden(4)),
      ValueError,
      r'OneForbidden.allowed returns bool of shape \(4,\): return .* \(3,\), ',
    ),
    (
      Constraint(automaton=_Broken(3, mask=lambda state: jnp.zeros(3))),
      ValueError,
      '_Broken.allowed returns float32 .*: return bool of shape',
    ),
    (
      Constraint(automaton=_Broken(3, state=lambda token: jnp.zeros(2))),
      ValueError,
      r'_Broken.advance returns a state of shapes \(2,\): return',
    ),
    (
      Constraint(automaton=_Array(3, table=np.zeros(3))),
      TypeError,
      '_Array is not hashable: make it a frozen dataclass, with eq=False',
    ),
    (grammar.OneForbidden(3), TypeError, 'constraint is .*: give a Constraint'),
    (
      dataclasses.replace(_CONSTRAINT, start=[0, 1, 2]),
      ValueError,
      r'start is \[0, 1, 2\]: give a state like 0, which OneForbidden.start',
    ),
    (
      dataclasses.replace(_CONSTRAINT, start=np.zeros(3, int)),
      ValueError,
      r'start is int64 of shape \(3,\): give integers .* per row, \(2,\)',
    ),
    (
      dataclasses.replace(_CONSTRAINT, start=0.5),
      ValueError,
      'start is float64 of shape .*: give integers',
    ),
  ],
)
def test_refuses(constraint, error, message):
  with pytest.raises(error, match=message):
    sampling_lib.per_row(Sampling(constraint=constraint), 2, 3)


@pytest.mark.slow
def test_the_example_of_the_document_writes_what_its_grammar_allows():
  tokens = '[],0123456789$'
  backend = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({c: i for i, c in enumerate(tokens)}, '$')
  )
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Split('', 'isolated')
  tokenizer = tokenizer_lib.Tokenizer(
    backend=backend, end_ids=(tokens.index('$'),), named_tokens={}
  )
  model = testing.tiny_llama(vocab_size=16)
  prompts, lengths = specsample.pad_prompts([[3, 2, 4], [5]])
  names = {
    'loaded': specsample.Loaded(
      model, model.init(jax.random.key(0)), tokenizer
    ),
    'prompts': prompts,
    'lengths': lengths,
  }
  text = (_ROOT / 'docs' / 'getting_started.md').read_text('utf-8')
  blocks = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  (example,) = (block for block in blocks if 'Constraint(' in block)
  # Likely to end, and not always the same.
  example = example.replace('constraint=', 'temperature=2.0, constraint=')
  exec(compile(example, 'getting_started.md', 'exec'), names)
  output = names['output']
  for row, length in zip(output.tokens, output.lengths, strict=True):
    written = ''.join(tokens[i] for i in row[:length])
    assert re.fullmatch(r'\[(\d,)*(\d|\d\]\$)?', written), written
    assert length > 2


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


@pytest.mark.slow
def test_tokens_are_those_of_plain_sampling_and_all_allowed():
  prompts, lengths = specsample.pad_prompts(_PROMPTS)
  run = {
    'model': _MODEL,
    'verify': verify.coupled,
    'sampling': _constrained(_STARTS),
    'max_new_tokens': 24,
  }
  arguments = (scene.PARAMS, prompts, lengths, jax.random.key(2))
  testing.assert_equals_plain_sampling(*arguments, drafter=_CHAIN, **run)
  output = specsample.generate(*arguments, drafter=_CHAIN, **run)
  assert output.accepted[:, 1:].sum() > 10
  for tokens, start in zip(output.tokens, _STARTS, strict=True):
    _assert_follows(tokens, start)


@pytest.mark.slow
def test_a_refilled_row_begins_at_its_own_start():
  run = {
    'model': _MODEL,
    'drafter': _CHAIN,
    'verify': verify.chain,
    'sampling': _constrained(_STARTS),
    'max_new_tokens': np.asarray([24, 5, 9, 24, 20]),
  }
  key = jax.random.key(2)
  outputs = specsample.generate_all(
    scene.PARAMS, _PROMPTS, key, batch_size=2, **run
  )
  expected = scene.generate(_PROMPTS, seed=2, **run)
  for i, output in enumerate(outputs):
    found = output.tokens[0]
    np.testing.assert_array_equal(found, expected.tokens[i, : found.size])
    _assert_follows(found, _STARTS[i])


def test_each_turn_begins_at_the_start():
  decoder, state = scene.prefill(
    _PROMPTS[:2],
    seed=2,
    model=_MODEL,
    drafter=_CHAIN,
    verify=verify.block,
    sampling=_constrained(_STARTS[:2]),
    max_new_tokens=16,
    max_length=128,
  )
  for turn in range(2):
    if turn:
      text = np.asarray([[0, 1], [2, 0]])
      state = specsample.extend(
        decoder, scene.PARAMS, state, text, [2, 1], max_new_tokens=16
      )
    # Rounds are run one by one, as for streaming.
    while not np.all(state.done):
      state = specsample.advance(decoder, scene.PARAMS, state, max_rounds=1)
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


@pytest.mark.slow
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
  output = scene.generate(
    [[1, 2, 0, 1, 2]] * 3,
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
  output = scene.generate(
    [[1]],
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
