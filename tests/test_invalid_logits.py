"""Logits that are no distribution stop their row, and bias nothing before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.testing import chi_square
from specsample.types import StopReason

_VOCAB = 16
_TARGET = testing.HashModel(vocab_size=_VOCAB, seed=3)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_TARGET, noise=0.3), num_draft_tokens=3
)
_NGRAM = drafters.Ngram(num_draft_tokens=4, min_ngram=1)
_RULES = {
  'chain': verify.chain,
  'block': verify.block,
  'coupled': verify.coupled,
}


def _generate(prompts, **settings):
  padded, lengths = specsample.pad_prompts(prompts)
  arguments = {
    'model': _TARGET,
    'drafter': _CHAIN,
    'verify': verify.chain,
    'sampling': specsample.Sampling(temperature=1.0),
    'max_new_tokens': 40,
  }
  return specsample.generate(
    {'target': {}, 'drafter': {}},
    padded,
    lengths,
    jax.random.key(0),
    **(arguments | settings),
  )


def _rows(output):
  return [
    row[:length].tolist()
    for row, length in zip(
      np.asarray(output.tokens), np.asarray(output.lengths), strict=True
    )
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Breaks(testing.HashModel):
  """Returns bad logits behind one token."""

  value: float = float('nan')
  behind: int = 5

  def apply(self, params, tokens, cache, features=()):
    output, cache = super().apply(params, tokens, cache, features)
    bad = (tokens == self.behind)[..., None]
    logits = jnp.where(bad, self.value, output.logits)
    return dataclasses.replace(output, logits=logits), cache


# What is no distribution is known before the rule: of the others one pair.
@pytest.mark.parametrize(
  ('drafter', 'rule', 'value'),
  [
    (drafters.NoDraft(), 'chain', float('nan')),
    (_CHAIN, 'chain', float('nan')),
    (_CHAIN, 'block', float('nan')),
    (_NGRAM, 'chain', float('nan')),
    (_NGRAM, 'coupled', float('nan')),
    (_CHAIN, 'block', float('-inf')),
    (_CHAIN, 'block', float('inf')),
  ],
)
def test_they_stop_their_row_only(drafter, rule, value):
  model = _Breaks(vocab_size=_VOCAB, seed=3, value=value)
  prompts = [[5], [5, 1], [1, 2, 3]]
  settings = {'drafter': drafter, 'verify': _RULES[rule]}
  output = _generate(prompts, model=model, **settings)
  good = _generate(prompts, **settings)
  without = _generate([[1], *prompts[1:]], model=model, **settings)
  assert _rows(without)[1:] == _rows(output)[1:]
  assert without.lengths[0] > 0 and max(output.lengths) > 1
  assert output.lengths[0] == 0
  assert output.stop_reason[0] == StopReason.INVALID_LOGITS
  for row, reference, reason in zip(
    _rows(output), _rows(good), output.stop_reason, strict=True
  ):
    assert 5 not in row[:-1]
    if row and row[-1] == 5:
      assert reason == StopReason.INVALID_LOGITS
    if drafter is not _CHAIN and row:  # its acceptance is judged as before
      assert row == reference[: len(row)]


def test_greedy_rows_stop_too():
  model = _Breaks(vocab_size=_VOCAB, seed=3)
  output = _generate(
    [[5]], model=model, sampling=specsample.Sampling(temperature=0.0)
  )
  assert output.lengths[0] == 0
  assert output.stop_reason[0] == StopReason.INVALID_LOGITS


@pytest.mark.parametrize('rule', ['chain', 'block'])
@pytest.mark.parametrize('broken', ['target', 'draft'])
def test_what_comes_before_them_is_distributed_as_ever(rule, broken):
  # The first token has a distribution; behind token 2 one side has none.
  target = testing.HashModel(vocab_size=3)
  breaks = _Breaks(vocab_size=3, behind=2)
  drafter = drafters.Chain(
    model=dataclasses.replace(
      breaks if broken == 'draft' else target, noise=0.6
    ),
    num_draft_tokens=3,
  )
  num_rows = 16384
  output = _generate(
    [[1, 0, 1]] * num_rows,
    model=breaks if broken == 'target' else target,
    drafter=drafter,
    verify=_RULES[rule],
    max_new_tokens=4,
  )
  law = testing.conditional.from_model(target, {}, (1, 0, 1))(0, 0)[0]
  first = np.asarray(output.tokens)[:, 0]
  counts = np.bincount(first, minlength=3)
  assert chi_square.test([(counts, law)]).passed, (counts / num_rows, law)
  if broken == 'draft':
    assert set(output.stop_reason.tolist()) == {StopReason.MAX_NEW_TOKENS}
    assert specsample.stats.of(output).tokens_per_round > 1


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_row_without_an_allowed_token_stops(temperature):
  # Only ids 0 and 1 are tokens of this model, and the bias forbids both.
  model = testing.HashModel(vocab_size=_VOCAB, padding=_VOCAB - 2)
  forbidden = np.where(np.arange(_VOCAB) < 2, -np.inf, 0)
  output = _generate(
    [[1], [1]],
    model=model,
    drafter=_NGRAM,
    sampling=specsample.Sampling(
      temperature=temperature,
      logit_bias=np.stack([forbidden, np.zeros(_VOCAB)]),
    ),
  )
  assert output.lengths.tolist() == [0, 40]
  assert output.stop_reason.tolist() == [
    StopReason.INVALID_LOGITS,
    StopReason.MAX_NEW_TOKENS,
  ]
