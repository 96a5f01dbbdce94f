"""Drafts that the host supplies between two rounds."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import verify
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.types import Origin

_TARGET = testing.HashModel(vocab_size=8)
_GIVEN = drafters.Given(num_draft_tokens=3)
_PARAMS = {'target': {}}
_ARGUMENTS = {'sampling': Sampling(), 'max_new_tokens': 8}
_PROMPTS, _LENGTHS = np.asarray([[1, 2], [3, 0]]), np.asarray([2, 1])
_KEY = jax.random.key(0)


def _advance(state, rounds, rule=verify.chain):
  return decode.advance(
    Decoder(_TARGET, _GIVEN, rule), _PARAMS, state, max_rounds=rounds
  )


def _prefill():
  return decode.prefill(
    Decoder(_TARGET, _GIVEN, verify.chain),
    _PARAMS,
    _PROMPTS,
    _LENGTHS,
    _KEY,
    **_ARGUMENTS,
  )


def test_what_is_given_is_proposed_once():
  plain = decode.generate(
    _PARAMS,
    _PROMPTS,
    _LENGTHS,
    _KEY,
    model=_TARGET,
    drafter=drafters.NoDraft(),
    verify=verify.chain,
    **_ARGUMENTS,
  )
  greedy = np.asarray(plain.tokens)
  # The first row's own tokens; the second row's with a wrong one in the middle.
  wrong = (greedy[1, 1] + 1) % 8
  drafts = [greedy[0, :3], [greedy[1, 0], wrong, greedy[1, 2]]]
  state = _advance(_GIVEN.give(_prefill(), np.asarray(drafts)), 1)
  assert (state.length - state.prompt_length).tolist() == [4, 2]
  assert state.accepted.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
  # Nothing is given for the second round, and for the third one token in row 2.
  state = _advance(state, 1)
  assert (state.length - state.prompt_length).tolist() == [5, 3]
  drafts = np.stack([greedy[0, 5:8], [greedy[1, 3], -1, -1]])
  state = _advance(_GIVEN.give(state, drafts), 5)
  output = decode.finish(state, max_new_tokens=8)
  np.testing.assert_array_equal(output.tokens, greedy)
  assert output.proposed.tolist()[1] == [4, 1, 0, 1]
  assert output.origin[1, 3] == Origin.ACCEPTED


_widths_read: list[int] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(testing.HashModel):
  """The same model, but it records how many tokens each pass reads."""

  def read(self, params, tokens, *args, **kwargs):
    width = tokens.shape[1]
    jax.debug.callback(lambda: _widths_read.append(width))
    return super().read(params, tokens, *args, **kwargs)


def test_where_nothing_is_given_the_target_reads_one_token():
  state = _prefill()
  drafts = np.asarray([[-1, -1, -1], [1, -1, -1]])
  for given, expected in ((drafts, 4), (drafts[:1], 1), (None, 1)):
    if given is not None:
      state = _GIVEN.give(state, np.broadcast_to(given, (2, 3)))
    jax.effects_barrier()
    _widths_read.clear()
    state = decode.advance(
      Decoder(_Watched(vocab_size=8), _GIVEN, verify.chain),
      _PARAMS,
      state,
      max_rounds=1,
    )
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert _widths_read == [expected]


def test_what_is_given_for_a_round_without_drafts_is_dropped():
  drafter = drafters.Adaptive(drafter=_GIVEN, policies=(policies.Fixed(0),))
  state = decode.prefill(
    Decoder(_TARGET, drafter, verify.chain),
    _PARAMS,
    _PROMPTS,
    _LENGTHS,
    _KEY,
    **_ARGUMENTS,
  )
  given = _GIVEN.give(state, np.ones((2, 3), np.int32)).draft
  draft = dataclasses.replace(state.draft, inner=given)
  state = dataclasses.replace(state, draft=draft)
  state = decode.advance(
    Decoder(_TARGET, drafter, verify.chain), _PARAMS, state, max_rounds=1
  )
  np.testing.assert_array_equal(state.draft.inner.tokens, -1)


@pytest.mark.parametrize('rule', [verify.chain, verify.block, verify.traversal])
def test_a_draft_ends_before_an_id_that_the_target_lacks(rule):
  state = _prefill()
  greedy = np.asarray(_advance(state, 4).tokens)
  first = greedy[np.arange(2), _LENGTHS]
  drafts = np.stack([[first[0], 8, 1], [2**31 - 1, first[1], 1]])
  given = _GIVEN.give(_prefill(), drafts)
  state = _advance(given, 1, rule)
  assert (state.length - state.prompt_length).tolist() == [2, 1]
  assert state.proposed.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
  assert state.tokens[0, 2:4].tolist() == greedy[0, 2:4].tolist()
  assert state.tokens[1, 1] == greedy[1, 1]


@pytest.mark.parametrize(
  ('drafts', 'message'),
  [
    (np.zeros((2, 2), np.int32), r'of shape \(2, 2\): give int32 token ids'),
    (
      np.full((2, 3), 1.7),
      r'are float64 of shape \(2, 3\): give int32 token ids',
    ),
    (np.ones((2, 3)), r'are float64 of shape'),
    (np.full((2, 3), np.nan), r'are float64 of shape'),
    (
      np.full((2, 3), 2**32),
      r'are int64 of shape \(2, 3\): give int32 token ids',
    ),
  ],
)
def test_what_is_no_draft_is_refused(drafts, message):
  with pytest.raises(ValueError, match=message):
    _GIVEN.give(_prefill(), drafts)


def test_no_drafts_at_all_are_refused():
  with pytest.raises(ValueError, match='num_draft_tokens is 0'):
    drafters.Given(num_draft_tokens=0)
