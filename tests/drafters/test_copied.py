"""Drafts that are copied: from the text so far, or from what the host gives."""

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
from tests.drafters import rounds


def _propose(sequence, **settings):
  drafter = drafters.Ngram(num_draft_tokens=4, **settings)
  tokens, length = rounds.rows([sequence])
  draft, _ = drafter.propose({}, None, None, tokens, length, ())
  return draft.tokens[0].tolist()


def _brute_force(sequence, num_draft_tokens, max_ngram, min_ngram):
  """Continues the latest of the longest matches, on into its own draft."""
  for n in range(min(max_ngram, len(sequence) - 1), min_ngram - 1, -1):
    for start in range(len(sequence) - 1, n - 1, -1):
      if sequence[start - n : start] == sequence[-n:]:
        extended = list(sequence)
        for i in range(num_draft_tokens):
          extended.append(extended[start + i])
        return extended[len(sequence) :]
  return [-1] * num_draft_tokens


@pytest.mark.slow(but=('0-1',))
@pytest.mark.parametrize('min_ngram', [1, 2])
@pytest.mark.parametrize('seed', range(20))
def test_ngram_equals_a_search_by_hand(seed, min_ngram):
  rng = np.random.default_rng(seed)
  # Token 0 is the padding too.
  sequence = rng.integers(0, 3 + min_ngram, size=rng.integers(1, 20)).tolist()
  sizes = {'max_ngram': int(rng.integers(2, 6)), 'min_ngram': min_ngram}
  expected = _brute_force(sequence, 4, **sizes)
  assert _propose(sequence, **sizes) == expected


def _branches(sequence, **settings):
  drafter = drafters.NgramTree(**settings)
  tokens, length = rounds.rows([sequence])
  draft, _ = drafter.propose({}, None, None, tokens, length, ())
  assert drafter.topology.parents == tuple(draft.parents[0].tolist())
  return np.asarray(draft.tokens[0]).reshape(-1, drafter.depth).tolist()


def test_branches_continue_other_occurrences():
  # 9 1 2 is the longest match. Matches of 1 2 follow, the latest first, except
  # the one whose continuation begins with the same token as another's.
  sequence = [1, 2, 8, 1, 2, 3, 4, 9, 1, 2, 5, 6, 1, 2, 3, 7, 9, 1, 2]
  found = _branches(sequence, num_branches=4, depth=3, max_ngram=3)
  assert found == [[5, 6, 1], [3, 7, 9], [8, 1, 2], [-1, -1, -1]]


def test_first_branch_is_the_chain():
  rng = np.random.default_rng(0)
  for _ in range(20):
    sequence = rng.integers(0, 3, size=15).tolist()
    first, *others = _branches(sequence, num_branches=3, depth=4)
    assert first == _propose(sequence)
    firsts = [path[0] for path in [first, *others] if path[0] >= 0]
    assert len(set(firsts)) == len(firsts)


_widths_read: list[int] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(testing.HashModel):
  """The same model, but it records how many tokens each pass reads."""

  def read(self, params, tokens, *args, **kwargs):
    width = tokens.shape[1]
    jax.debug.callback(lambda: _widths_read.append(width))
    return super().read(params, tokens, *args, **kwargs)


_TARGET = testing.HashModel(vocab_size=8)
_GIVEN = drafters.Given(num_draft_tokens=3)
_LENGTHS = np.asarray([2, 1])


def _prefill(drafter=_GIVEN, rule=verify.chain, max_new_tokens=8):
  return decode.prefill(
    Decoder(_TARGET, drafter, rule),
    {'target': {}},
    np.asarray([[1, 2], [3, 0]]),
    _LENGTHS,
    jax.random.key(0),
    sampling=Sampling(),
    max_new_tokens=max_new_tokens,
  )


def _advance(state, count, rule=verify.chain, model=_TARGET, drafter=_GIVEN):
  decoder = Decoder(model, drafter, rule)
  return decode.advance(decoder, {'target': {}}, state, max_rounds=count)


def _widths_of_a_round(state, rule=verify.chain, drafter=_GIVEN):
  """Returns the state after a round, and the widths of the target's passes."""
  jax.effects_barrier()
  _widths_read.clear()
  state = _advance(state, 1, rule, _Watched(vocab_size=8), drafter)
  jax.block_until_ready(state)
  jax.effects_barrier()
  return state, list(_widths_read)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'rule'),
  [
    (drafters.Ngram(num_draft_tokens=3), verify.chain),
    (drafters.NgramTree(num_branches=2, depth=2), verify.tree),
  ],
)
def test_where_no_row_has_a_match_the_target_reads_one_token(drafter, rule):
  state, seen = _prefill(drafter, rule, max_new_tokens=60), set()
  for _ in range(16):
    undrafted = np.asarray(state.proposed)[:, 0]
    state, widths = _widths_of_a_round(state, rule, drafter)
    is_drafted = bool(np.any(state.proposed[:, 0] == undrafted))
    assert widths == [1 + is_drafted * drafter.num_draft_tokens]
    seen.add(is_drafted)
  assert seen == {False, True}


def test_where_nothing_is_given_the_target_reads_one_token():
  state = _prefill()
  drafts = np.asarray([[-1, -1, -1], [1, -1, -1]])
  for given, expected in ((drafts, 4), (drafts[:1], 1), (None, 1)):
    if given is not None:
      state = _GIVEN.give(state, np.broadcast_to(given, (2, 3)))
    state, widths = _widths_of_a_round(state)
    assert widths == [expected]


def test_what_is_given_is_proposed_once():
  plain = decode.finish(_advance(_prefill(), 8), max_new_tokens=8)
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


def test_what_is_given_for_a_round_without_drafts_is_dropped():
  drafter = drafters.Adaptive(drafter=_GIVEN, policies=(policies.Fixed(0),))
  state = _prefill(drafter)
  given = _GIVEN.give(state, np.ones((2, 3), np.int32)).draft
  draft = dataclasses.replace(state.draft, inner=given)
  state = dataclasses.replace(state, draft=draft)
  state = _advance(state, 1, drafter=drafter)
  np.testing.assert_array_equal(state.draft.inner.tokens, -1)


@pytest.mark.parametrize('rule', [verify.chain, verify.block, verify.traversal])
def test_draft_ends_before_an_id_that_the_target_lacks(rule):
  greedy = np.asarray(_advance(_prefill(), 4).tokens)
  first = greedy[np.arange(2), _LENGTHS]
  drafts = np.stack([[first[0], 8, 1], [2**31 - 1, first[1], 1]])
  state = _advance(_GIVEN.give(_prefill(), drafts), 1, rule)
  assert (state.length - state.prompt_length).tolist() == [2, 1]
  assert state.proposed.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
  assert state.tokens[0, 2:4].tolist() == greedy[0, 2:4].tolist()
  assert state.tokens[1, 1] == greedy[1, 1]


@pytest.mark.parametrize(
  ('drafts', 'message'),
  [
    (np.zeros((2, 2), np.int32), r'of shape \(2, 2\): give int32 token ids'),
    (np.full((2, 3), 1.7), r'float64 of shape \(2, 3\): give int32 token ids'),
    (np.full((2, 3), np.nan), r'are float64 of shape'),
    (np.full((2, 3), 2**32), r'int64 of shape \(2, 3\): give int32 token ids'),
  ],
)
def test_what_is_no_draft_is_refused(drafts, message):
  with pytest.raises(ValueError, match=message):
    _GIVEN.give(_prefill(), drafts)
