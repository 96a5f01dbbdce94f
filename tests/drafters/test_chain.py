"""A draft model drafts its own continuation, whatever was accepted before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample.testing import conditional as conditional_lib
from specsample.types import DraftKind, Verdict

_MODEL = testing.HashModel(vocab_size=16)
_K = 3
_CHAIN = drafters.Chain(model=_MODEL, num_draft_tokens=_K)
_PROMPTS = [[1, 2, 3, 4], [5], [9, 9, 9, 9, 9, 9, 9]]
_WIDTH = 24


def _softmax(logits, drafted):
  del drafted
  return jax.nn.softmax(logits)


def _best(probs, position):
  del position
  return jnp.argmax(probs, axis=-1).astype(jnp.int32)


def _rows(sequences):
  lengths = np.asarray([len(row) for row in sequences], np.int32)
  tokens = np.zeros((len(sequences), _WIDTH), np.int32)
  for row, sequence in zip(tokens, sequences, strict=True):
    row[: len(sequence)] = sequence
  return jnp.asarray(tokens), jnp.asarray(lengths)


def _begin(drafter, params, sequences):
  """Returns the state after a prefill of all tokens but the pending one."""
  tokens, lengths = _rows(sequences)
  state = drafter.init(params, len(sequences), _WIDTH)
  width = max(map(len, sequences))
  return drafter.observe(
    params, tokens[:, :width], lengths - 1, None, None, state
  )


def _after(state, before, after):
  """Returns the state after a round that extended each text."""
  rounds = [new[len(old) - 1 :] for old, new in zip(before, after, strict=True)]
  tokens, lengths = _rows(rounds)
  return _CHAIN.observe(
    {'drafter': {}},
    tokens[:, : _K + 1],
    lengths - 1,
    None,
    Verdict(num_accepted=lengths - 2, next_token=None),
    state,
  )


def _propose(drafter, params, sequences, state):
  tokens, lengths = _rows(sequences)
  return drafter.propose(params, _best, _softmax, tokens, lengths, state)


def _greedy(model, prompt, count):
  """Returns the model's own continuation, one fresh table per token."""
  probs = []
  for _ in range(count):
    table = conditional_lib.from_model(model, {}, tuple(prompt))
    probs.append(table(0, 0)[0])
    prompt = [*prompt, int(probs[-1].argmax())]
  return prompt[-count:], np.stack(probs)


def test_drafts_are_the_models_own_continuation():
  state = _begin(_CHAIN, {'drafter': {}}, _PROMPTS)
  draft, _ = _propose(_CHAIN, {'drafter': {}}, _PROMPTS, state)
  assert draft.kind is DraftKind.SAMPLED
  for i, prompt in enumerate(_PROMPTS):
    tokens, probs = _greedy(_MODEL, prompt, _K)
    assert draft.tokens[i].tolist() == tokens
    np.testing.assert_allclose(draft.probs[i], probs, atol=1e-6)


@pytest.mark.parametrize('kept', [(0, 1, 2), (3, 3, 3), (2, 3, 0)])
def test_what_was_kept_is_seen_and_what_was_not_is_forgotten(kept):
  params = {'drafter': {}}
  sequences = _PROMPTS
  state = _begin(_CHAIN, params, sequences)
  for next_token in (7, 11):
    draft, state = _propose(_CHAIN, params, sequences, state)
    before, sequences = (
      sequences,
      [
        [*row, *drafted[:count].tolist(), next_token]
        for row, drafted, count in zip(
          sequences, draft.tokens, kept, strict=True
        )
      ],
    )
    state = _after(state, before, sequences)
  draft, _ = _propose(_CHAIN, params, sequences, state)
  fresh, _ = _propose(
    _CHAIN, params, sequences, _begin(_CHAIN, params, sequences)
  )
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)
  np.testing.assert_array_equal(draft.probs, fresh.probs)


@pytest.mark.parametrize('num_right', [0, 1, 2, 3])
def test_what_another_drafter_drafted_is_not_taken_for_its_own(num_right):
  params = {'drafter': {}}
  state = _begin(_CHAIN, params, _PROMPTS)
  draft, state = _propose(_CHAIN, params, _PROMPTS, state)
  # The first `num_right` tokens are as drafted, the others are not; the rule
  # accepted all of them.
  sequences = [
    [
      *row,
      *drafted[:num_right].tolist(),
      *(drafted[num_right:] ^ 1).tolist(),
      7,
    ]
    for row, drafted in zip(_PROMPTS, np.asarray(draft.tokens), strict=True)
  ]
  tokens, lengths = _rows(sequences)
  state = _after(state, _PROMPTS, sequences)
  # The last draft token was never fed.
  known = np.asarray([len(row) for row in _PROMPTS]) + min(num_right, _K - 1)
  np.testing.assert_array_equal(state.length, known)
  state = _CHAIN.resume(params, tokens, lengths, state)
  draft, _ = _propose(_CHAIN, params, sequences, state)
  fresh, _ = _propose(
    _CHAIN, params, sequences, _begin(_CHAIN, params, sequences)
  )
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)
  np.testing.assert_array_equal(draft.probs, fresh.probs)


def test_skip_drafts_as_the_layers_it_keeps():
  model = testing.tiny_llama(vocab_size=16, num_layers=3)
  params = {'target': model.init(jax.random.key(0))}
  skip = drafters.Skip(model=model, layers=(0, 2), num_draft_tokens=_K)
  draft, _ = _propose(skip, params, _PROMPTS, _begin(skip, params, _PROMPTS))

  layers = params['target']['layers']
  two = dataclasses.replace(model, num_layers=2)
  kept = params['target'] | {'layers': {0: layers[0], 1: layers[2]}}
  chain = drafters.Chain(model=two, num_draft_tokens=_K)
  expected, _ = _propose(
    chain,
    {'drafter': kept},
    _PROMPTS,
    _begin(chain, {'drafter': kept}, _PROMPTS),
  )
  np.testing.assert_array_equal(draft.tokens, expected.tokens)
  np.testing.assert_allclose(draft.probs, expected.probs, atol=1e-6)
  whole = drafters.Skip(model=model, layers=(0, 1, 2), num_draft_tokens=_K)
  other, _ = _propose(whole, params, _PROMPTS, _begin(whole, params, _PROMPTS))
  assert np.abs(other.probs - draft.probs).max() > 1e-4


@pytest.mark.parametrize('layers', [(), (3,), (-1,)])
def test_skip_refuses_layers_that_are_not_there(layers):
  model = testing.tiny_llama(num_layers=3)
  with pytest.raises(ValueError, match='layers 0 to 2'):
    drafters.Skip(model=model, layers=layers, num_draft_tokens=2)
