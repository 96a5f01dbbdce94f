"""Constraints: what `warp` makes of them, what is refused, and the example."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specsample
from specsample import sampling as sampling_lib
from specsample import testing
from specsample.constraint import Constraint
from specsample.sampling import Sampling
from specsample.testing import grammar
from specsample.text import tokenizer as tokenizer_lib

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
  text = (_ROOT / 'docs' / 'constraints.md').read_text('utf-8')
  (example,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  # Likely to end, and not always the same.
  example = example.replace('constraint=', 'temperature=2.0, constraint=')
  exec(compile(example, 'constraints.md', 'exec'), names)
  output = names['output']
  for row, length in zip(output.tokens, output.lengths, strict=True):
    written = ''.join(tokens[i] for i in row[:length])
    assert re.fullmatch(r'\[(\d,)*(\d|\d\]\$)?', written), written
    assert length > 2
