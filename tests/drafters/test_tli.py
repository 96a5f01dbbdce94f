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

_K = 3
_TARGET = testing.HashModel(vocab_size=6)
_MODEL = testing.HashModel(vocab_size=7, noise=0.5, noise_seed=3)
_TLI = drafters.TLI(model=_MODEL, vocab_size=6, num_draft_tokens=_K)
# Only the target has its tokens 2 and 3, only the draft model its 3, 4 and 6.
_DRAFT_IDS = np.asarray([5, 0, -1, -1, 1, 2], np.int32)
_PIECES = ([5], [0], [3, 4], [], [1], [2])  # 3 is a control token
_PREFIX = (6,)
_PROMPTS = [[1, 2, 3, 4], [5], [2, 2, 0, 2, 2, 3, 2], [3]]
_OF_PROMPTS = [
  [6, 0, 3, 4, 1],
  [6, 2],
  [6, 3, 4, 3, 4, 5, 3, 4, 3, 4, 3, 4],
  [6],
]
_WIDTH = 24


def _params(draft_params, draft_ids=_DRAFT_IDS, pieces=_PIECES, prefix=_PREFIX):
  table = np.full((len(pieces), max(map(len, pieces))), -1, np.int32)
  for row, ids in zip(table, pieces, strict=True):
    row[: len(ids)] = ids
  own = vocab_map.VocabMap(
    kind=vocab_map.Kind.INTERSECTION,
    draft_ids=draft_ids,
    pieces=table,
    prefix=prefix,
    num_draft_tokens=7,
    num_target_tokens=6,
  )
  return {'target': {}, 'drafter': own.params(draft_params)}


_PARAMS = _params({})


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


@functools.partial(jax.jit, static_argnames=('drafter', 'width'))
def _take_in(params, tokens, lengths, *, drafter, width):
  """Returns the state after a prefill in chunks of `width` tokens."""
  state = drafter.init(params, len(tokens), _WIDTH)
  for start in range(0, _WIDTH, width):
    count = jnp.clip(lengths - 1 - start, 0, width)
    chunk = tokens[:, start : start + width]
    state = drafter.observe(params, chunk, count, None, None, state)
  return state


@functools.partial(jax.jit, static_argnames=('drafter',))
def _propose(params, tokens, lengths, state, *, drafter):
  return drafter.propose(params, _best, _softmax, tokens, lengths, state)


def _begun(sequences, drafter=_TLI, params=_PARAMS, width=8):
  return _take_in(params, *_rows(sequences), drafter=drafter, width=width)


def _drafted(sequences, state, drafter=_TLI, params=_PARAMS):
  return _propose(params, *_rows(sequences), state, drafter=drafter)


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


@pytest.mark.parametrize('width', [2, 24])
def test_prompts_are_taken_in_as_pieces(width):
  state = _begun(_PROMPTS, width=width)
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
  state = _begun(_PROMPTS)
  draft, state = _drafted(_PROMPTS, state)
  assert draft.kind is DraftKind.SAMPLED
  for i, pieces in enumerate(_OF_PROMPTS):
    tokens, probs = _by_hand(pieces, _K)
    assert draft.tokens[i].tolist() == tokens
    np.testing.assert_allclose(draft.probs[i], probs, atol=1e-6)
    assert np.all(np.asarray(draft.probs[i])[:, [2, 3]] == 0)
    assert state.count[i] == len(pieces)
    assert state.num_known[i] == len(pieces) + _K - 1


@pytest.mark.parametrize('kept', [(0, 1, 2, 0), (3, 3, 3, 3), (2, 3, 0, 1)])
def test_what_was_kept_is_seen_and_what_was_not_is_forgotten(kept):
  sequences, state = _PROMPTS, _begun(_PROMPTS)
  for next_token in (2, 3, 1):  # tokens of two pieces, none and one
    draft, state = _drafted(sequences, state)
    sequences = [
      [*row, *drafted[:count].tolist(), next_token]
      for row, drafted, count in zip(sequences, draft.tokens, kept, strict=True)
    ]
  draft, state = _drafted(sequences, state)
  fresh, fresh_state = _drafted(sequences, _begun(sequences))
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)
  np.testing.assert_array_equal(draft.probs, fresh.probs)
  assert _known(state) == _known(fresh_state)
  np.testing.assert_array_equal(state.count, fresh_state.count)


def test_without_room_nothing_is_drafted_and_nothing_breaks():
  short = dataclasses.replace(_TLI, room=1.0, spare=1)
  sequences = [[2, 2, 0, 0], [1, 1, 1, 1], [2, 0, 0, 0]]
  draft, state = _drafted(sequences, _begun(sequences, short), short)
  # After the prefix there are six pieces, four, and five.
  assert [(row >= 0).all() for row in np.asarray(draft.tokens)] == [0, 1, 1]
  assert (draft.tokens[0] == -1).all() and (draft.probs[0] == 0).all()
  # Tokens with fewer pieces leave room again.
  longer = [[*row, 3, 3] for row in sequences]
  draft, _ = _drafted(longer, state, short)
  fresh, _ = _drafted(longer, _begun(longer))
  np.testing.assert_array_equal(draft.tokens, fresh.tokens)


def test_a_text_longer_than_the_draft_model_takes_is_not_continued():
  model = dataclasses.replace(_MODEL, max_length=12)
  drafter = dataclasses.replace(_TLI, model=model)
  sequences = [[1] * 8, [1] * 9]
  draft, _ = _drafted(sequences, _begun(sequences, drafter), drafter)
  assert (draft.tokens[0] >= 0).all() and (draft.tokens[1] == -1).all()


_GENERATE = {
  'prompts': np.asarray([[1, 2, 3, 4], [5, 0, 0, 0], [2, 2, 3, 0]]),
  'lengths': np.asarray([4, 1, 3]),
  'model': _TARGET,
  'max_new_tokens': 10,
}


@pytest.mark.nightly(but=('0.6',))
@pytest.mark.parametrize('room', [0.6, 1.5])
def test_rows_are_the_same_in_any_batch(room):
  drafter = dataclasses.replace(_TLI, room=room, spare=5)
  testing.assert_batch_invariant(
    _PARAMS,
    key=jax.random.key(1),
    drafter=drafter,
    verify=verify.block,
    sampling=Sampling(temperature=1.0),
    **_GENERATE,
  )


def test_coupled_output_is_plain_sampling():
  testing.assert_equals_plain_sampling(
    _PARAMS,
    key=jax.random.key(2),
    drafter=_TLI,
    verify=verify.coupled,
    sampling=Sampling(temperature=0.9),
    **_GENERATE,
  )


def test_a_tree_of_most_likely_tokens_begins_as_the_greedy_chain():
  topology = tree_lib.k_ary((2, 1, 1))
  tree = drafters.Tree(drafter=_TLI, topology=topology)
  propose = functools.partial(_propose, _PARAMS, drafter=tree)
  draft, state = propose(*_rows(_PROMPTS), _begun(_PROMPTS, tree))
  chain, _ = _drafted(_PROMPTS, _begun(_PROMPTS))
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
  found, _ = propose(*_rows(longer), state)
  fresh, _ = propose(*_rows(longer), _begun(longer, tree))
  np.testing.assert_array_equal(found.tokens, fresh.tokens)


@pytest.mark.parametrize(
  'of',
  [
    lambda tli: drafters.Tree(drafter=tli, topology=tree_lib.k_ary((5, 1, 1))),
    lambda tli: drafters.DynamicTree(drafter=tli, num_draft_tokens=6, width=5),
  ],
  ids=('Tree', 'DynamicTree'),
)
def test_a_tree_has_no_more_than_there_is_to_draft(of):
  short = of(dataclasses.replace(_TLI, room=1.0, spare=1))
  # The first row has no room; the second has four shared tokens for 5 children.
  sequences = [[2, 2, 0, 0], [1, 1, 1, 1]]
  draft, _ = _propose(
    _PARAMS, *_rows(sequences), _begun(sequences, short), drafter=short
  )
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


def test_params_of_another_kind_are_refused():
  with pytest.raises(ValueError, match='VocabMap'):
    _begun(_PROMPTS, params={'drafter': {}})
  other = dataclasses.replace(_TLI, vocab_size=5)
  with pytest.raises(ValueError, match='a target with 6 tokens'):
    _begun(_PROMPTS, other)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'num_draft_tokens': 0}, 'num_draft_tokens is 0'),
    ({'room': 0.0}, 'room is 0.0'),
    ({'spare': -1}, 'spare is -1'),
  ],
)
def test_settings_out_of_range_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_TLI, **settings)


def test_a_draft_model_without_room_for_a_draft_is_refused():
  model = dataclasses.replace(_MODEL, max_length=_K)
  with pytest.raises(ValueError, match='the draft model takes 3 tokens'):
    _begun(_PROMPTS, dataclasses.replace(_TLI, model=model))
