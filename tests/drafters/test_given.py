"""Drafts that the host gives between two rounds."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import decode
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import verify
from specsample.sampling import Sampling
from specsample.types import Origin

_TARGET = testing.HashModel(vocab_size=8)
_GIVEN = drafters.Given(num_draft_tokens=3)
_PARAMS = {'target': {}}
_ARGUMENTS = {'model': _TARGET, 'sampling': Sampling(), 'max_new_tokens': 8}
_PROMPTS, _LENGTHS = np.asarray([[1, 2], [3, 0]]), np.asarray([2, 1])
_KEY = jax.random.key(0)


def _advance(state, rounds):
  return decode.advance(
    _PARAMS,
    state,
    model=_TARGET,
    drafter=_GIVEN,
    verify=verify.chain,
    max_rounds=rounds,
  )


def _prefill():
  return decode.prefill(
    _PARAMS, _PROMPTS, _LENGTHS, _KEY, drafter=_GIVEN, **_ARGUMENTS
  )


def test_what_is_given_is_proposed_once():
  plain = decode.generate(
    _PARAMS,
    *(_PROMPTS, _LENGTHS, _KEY),
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    **_ARGUMENTS,
  )
  greedy = np.asarray(plain.tokens)
  # The first row's own tokens, and of the second's two with another between.
  wrong = (greedy[1, 1] + 1) % 8
  drafts = [greedy[0, :3], [greedy[1, 0], wrong, greedy[1, 2]]]
  state = _advance(_GIVEN.give(_prefill(), np.asarray(drafts)), 1)
  assert (state.length - state.prompt_length).tolist() == [4, 2]
  assert state.accepted.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
  # Nothing is given for the second round, and one token of the third.
  state = _advance(state, 1)
  assert (state.length - state.prompt_length).tolist() == [5, 3]
  drafts = np.stack([greedy[0, 5:8], [greedy[1, 3], -1, -1]])
  state = _advance(_GIVEN.give(state, drafts), 5)
  output = decode.finish(state, max_new_tokens=8)
  np.testing.assert_array_equal(output.tokens, greedy)
  assert output.proposed.tolist()[1] == [4, 1, 0, 1]
  assert output.origin[1, 3] == Origin.ACCEPTED


def test_what_is_given_for_a_round_without_drafts_is_dropped():
  drafter = drafters.Adaptive(drafter=_GIVEN, policies=(policies.Fixed(0),))
  state = decode.prefill(
    _PARAMS, _PROMPTS, _LENGTHS, _KEY, drafter=drafter, **_ARGUMENTS
  )
  given = _GIVEN.give(state, np.ones((2, 3), np.int32)).draft
  draft = dataclasses.replace(state.draft, inner=given)
  state = dataclasses.replace(state, draft=draft)
  state = decode.advance(
    _PARAMS,
    state,
    model=_TARGET,
    drafter=drafter,
    verify=verify.chain,
    max_rounds=1,
  )
  np.testing.assert_array_equal(state.draft.inner.tokens, -1)


def test_another_shape_is_refused():
  with pytest.raises(ValueError, match=r'shape \(2, 2\): give \(2, 3\)'):
    _GIVEN.give(_prefill(), np.zeros((2, 2), np.int32))
  with pytest.raises(ValueError, match='num_draft_tokens is 0'):
    drafters.Given(num_draft_tokens=0)
