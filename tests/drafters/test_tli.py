"""Drafts in another vocabulary: what is fed, drawn and forgotten."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters
from specsample import testing
from specsample import tree as tree_lib
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.types import DraftKind
from specsample.vocabularies import vocab_map
from tests.drafters import rounds

_K = 3
_TARGET = testing.HashModel(vocab_size=6)
_MODEL = testing.HashModel(vocab_size=7, noise=0.5, noise_seed=3)
_TLI = drafters.TLI(model=_MODEL, vocab_size=6, num_draft_tokens=_K)
# Only the target has its tokens 2 and 3, only the draft model its 3, 4 and 6.
_DRAFT_IDS = np.asarray([5, 0, -1, -1, 1, 2], np.int32)
_PIECES = ([5], [0], [3, 4], [], [1], [2])  # 3 is a control token
_PROMPTS = [[1, 2, 3, 4], [5], [2, 2, 0, 2, 2, 3, 2], [3]]
_OF_PROMPTS = [
  [6, 0, 3, 4, 1],
  [6, 2],
  [6, 3, 4, 3, 4, 5, 3, 4, 3, 4, 3, 4],
  [6],
]


_MAP = vocab_map.VocabMap(
  kind=vocab_map.Kind.INTERSECTION,
  draft_ids=_DRAFT_IDS,
  pieces=np.asarray([(*x, -1, -1)[:2] for x in _PIECES]),
  prefix=(6,),
  num_draft_tokens=7,
  num_target_tokens=6,
)
_PARAMS = {'target': {}, 'drafter': _MAP.params({})}
_begun = functools.partial(rounds.begin, _TLI, _PARAMS)
_drafted = functools.partial(rounds.propose, _TLI, _PARAMS, draw=rounds.best)


def _by_hand(pieces, count):
  """Returns the drafts after some pieces and their laws, token by token."""
  tokens, probs = [], []
  for _ in range(count):
    table = conditional_lib.from_model(_MODEL, {}, tuple(pieces))
    own = table(0, 0)[0]
    shared = np.where(_DRAFT_IDS < 0, 0, own[np.maximum(_DRAFT_IDS, 0)])
    probs.append(shared / shared.sum())
    tokens.append(int(probs[-1].argmax()))
    pieces = [*pieces, int(_DRAFT_IDS[tokens[-1]])]
  return tokens, np.stack(probs)


def _known(state):
  """Returns the hashes in each row's cache."""
  return [
    hashes[: known + 1].tolist()
    for hashes, known in zip(state.cache.hashes, state.num_known, strict=True)
  ]


@pytest.mark.slow
@pytest.mark.parametrize('width', [2, 24])
def test_prompts_are_taken_in_as_pieces(width):
  tokens, lengths = rounds.rows(_PROMPTS)
  state = _TLI.init(_PARAMS, *tokens.shape)
  for start in range(0, tokens.shape[1], width):
    count = jnp.clip(lengths - 1 - start, 0, width)
    chunk = tokens[:, start : start + width]
    state = _TLI.observe(_PARAMS, chunk, count, None, None, state)
  for i, pieces in enumerate(_OF_PROMPTS):
    # All pieces but the pending token's.
    count = len(pieces) - len(_PIECES[_PROMPTS[i][-1]])
    assert state.count[i] == count
    assert state.ids[i, :count].tolist() == pieces[:count]
    assert state.num_known[i] == count
  cache = _MODEL.init_cache(1, 16)
  _, cache = _MODEL.apply({}, jnp.asarray([_OF_PROMPTS[2][:10]]), cache)
  assert _known(state)[2] == cache.hashes[0, :11].tolist()


def test_drafts_are_those_of_the_shared_tokens():
  draft, state = _drafted(_PROMPTS)
  assert draft.kind is DraftKind.SAMPLED
  for i, pieces in enumerate(_OF_PROMPTS):
    tokens, probs = _by_hand(pieces, _K)
    assert draft.tokens[i].tolist() == tokens
    np.testing.assert_allclose(draft.probs[i], probs, atol=1e-6)
    assert np.all(np.asarray(draft.probs[i])[:, [2, 3]] == 0)
    assert state.count[i] == len(pieces)
    assert state.num_known[i] == len(pieces) + _K - 1


@pytest.mark.parametrize('kept', [(0, 1, 2, 3), (2, 3, 0, 1)])
def test_what_was_kept_is_seen_and_what_was_not_is_forgotten(kept):
  sequences, state = _PROMPTS, _begun(_PROMPTS)
  for next_token in (2, 3, 1):  # tokens of two pieces, none and one
    draft, state = _drafted(sequences, state)
    sequences = [
      [*row, *drafted[:count].tolist(), next_token]
      for row, drafted, count in zip(sequences, draft.tokens, kept, strict=True)
    ]
  draft, state = _drafted(sequences, state)
  fresh, fresh_state = _drafted(sequences)
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)
  np.testing.assert_array_equal(draft.probs, fresh.probs)
  assert _known(state) == _known(fresh_state)
  np.testing.assert_array_equal(state.count, fresh_state.count)


def test_without_room_nothing_is_drafted_and_nothing_breaks():
  short = dataclasses.replace(_TLI, room=1.0, spare=1)
  sequences = [[2, 2, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]]
  of_short = functools.partial(rounds.propose, short, _PARAMS, draw=rounds.best)
  draft, state = of_short(sequences)
  # After the prefix there are six pieces, four, and five.
  assert [(row >= 0).all() for row in np.asarray(draft.tokens)] == [0, 1, 1]
  assert (draft.tokens[0] == -1).all() and (draft.probs[0] == 0).all()
  # Tokens with fewer pieces leave room again.
  longer = [[*row, 3, 3] for row in sequences]
  draft, _ = of_short(longer, state)
  fresh, _ = _drafted(longer)
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)


def test_text_longer_than_the_draft_model_takes_is_not_continued():
  model = dataclasses.replace(_MODEL, max_length=12)
  drafter = dataclasses.replace(_TLI, model=model)
  sequences = [[1] * 8, [1] * 9]
  draft, _ = rounds.propose(drafter, _PARAMS, sequences)
  assert (draft.tokens[0] >= 0).all() and (draft.tokens[1] == -1).all()


_GENERATE = {
  'prompts': np.asarray([[1, 2, 3, 4], [5, 0, 0, 0], [2, 2, 3, 0]]),
  'lengths': np.asarray([4, 1, 3]),
  'model': _TARGET,
  'max_new_tokens': 10,
}


@pytest.mark.slow
def test_coupled_output_is_plain_sampling():
  testing.assert_equals_plain_sampling(
    _PARAMS,
    key=jax.random.key(2),
    drafter=_TLI,
    verify=verify.coupled,
    sampling=Sampling(temperature=0.9),
    **_GENERATE,
  )


@pytest.mark.slow
def test_tree_of_most_likely_tokens_begins_as_the_greedy_chain():
  topology = tree_lib.k_ary((2, 1, 1))
  tree = drafters.Tree(drafter=_TLI, topology=topology)
  propose = functools.partial(rounds.propose, tree, _PARAMS)
  draft, state = propose(_PROMPTS)
  chain, _ = _drafted(_PROMPTS)
  first = [0, topology.parents.index(1)]
  np.testing.assert_array_equal(
    np.asarray(draft.tokens)[:, first], np.asarray(chain.tokens)[:, :2]
  )
  testing.assert_greedy_equal(
    _PARAMS, drafter=tree, verify=verify.tree, **_GENERATE
  )
  # After another path and a token of two pieces, the draft is the same as if
  # the drafter had been given all tokens at once.
  other = [1, topology.parents.index(2)]
  kept = np.asarray(draft.tokens)[:, other].tolist()
  longer = [[*row, *path, 2] for row, path in zip(_PROMPTS, kept, strict=True)]
  found, _ = propose(longer, state)
  fresh, _ = propose(longer)
  np.testing.assert_array_equal(found.tokens, fresh.tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  'of',
  [
    lambda tli: drafters.Tree(drafter=tli, topology=tree_lib.k_ary((5, 1, 1))),
    lambda tli: drafters.DynamicTree(drafter=tli, num_draft_tokens=6, width=5),
  ],
  ids=('Tree', 'DynamicTree'),
)
def test_tree_has_no_more_than_there_is_to_draft(of):
  short = of(dataclasses.replace(_TLI, room=1.0, spare=1))
  # The first row has no room; the second has four shared tokens for 5 children.
  sequences = [[2, 2, 0, 0], [1, 1, 1, 1]]
  draft, _ = rounds.propose(short, _PARAMS, sequences)
  tokens = np.asarray(draft.tokens)
  assert (tokens[0] == -1).all()
  shared = np.flatnonzero(_DRAFT_IDS >= 0)
  assert np.isin(tokens[1], [*shared, -1]).all()
  first = tokens[1][np.asarray(draft.parents)[1] == 0]
  assert sorted(first[first >= 0]) == sorted(set(first[first >= 0]))
  assert (first >= 0).sum() <= shared.size
  testing.assert_greedy_equal(
    _PARAMS, drafter=short, verify=verify.tree, **_GENERATE
  )


@pytest.mark.parametrize(
  ('changes', 'params', 'message'),
  [
    ({}, {'drafter': {}}, 'VocabMap'),
    ({'vocab_size': 5}, _PARAMS, 'a target with 6 tokens'),
    (
      {'model': dataclasses.replace(_MODEL, max_length=_K)},
      _PARAMS,
      'the draft model takes 3 tokens',
    ),
  ],
)
def test_what_does_not_fit_is_refused(changes, params, message):
  with pytest.raises(ValueError, match=message):
    rounds.begin(dataclasses.replace(_TLI, **changes), params, _PROMPTS)
