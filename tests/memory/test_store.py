"""Stores of texts: the order of their places, and what is found in them."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample.memory import store as store_lib

_SEPARATOR = store_lib.SEPARATOR
_WIDTH = 24


def _find(look_up, store, context):
  tokens = np.zeros(_WIDTH, np.int32)
  tokens[: len(context)] = context
  return look_up(store, jnp.asarray(tokens), jnp.int32(len(context)))


def _looked_up(store, context, max_match, num_tokens, **settings):
  """Returns the draft as a list, how many tokens matched, and the shares."""
  look_up = functools.partial(
    store_lib.look_up, max_match=max_match, num_tokens=num_tokens, **settings
  )
  found = _find(look_up, store, context)
  tokens = found.tokens.tolist()
  return tokens, int(found.matched), np.asarray(found.share)


def _continuations(texts, context, max_match, num_tokens):
  """Returns what followed the longest suffix that a text has; its length."""
  for matched in range(min(max_match, len(context)), 0, -1):
    suffix = list(context[-matched:])
    found = [
      text[end : end + num_tokens]
      for text in map(list, texts)
      for end in range(matched, len(text) + 1)
      if text[end - matched : end] == suffix
    ]
    if found:
      return found, matched
  return [], 0


def _check_path(found, continuations):
  """Checks that each token is a most frequent one, and has the right share."""
  alive = continuations
  for i, (token, share) in enumerate(
    zip(found.tokens.tolist(), found.share.tolist(), strict=True)
  ):
    counts = collections.Counter(x[i] for x in alive if len(x) > i)
    if not counts:
      assert (token, share) == (-1, 0)
      alive = []
      continue
    assert counts[token] == max(counts.values())
    expected = (counts[token] - 0.5) / (len(alive) + 0.5)
    np.testing.assert_allclose(share, expected, atol=1e-6)
    alive = [x for x in alive if len(x) > i and x[i] == token]


@pytest.mark.parametrize(('vocab_size', 'capacity'), [(2, 700), (4, 2048)])
def test_look_up_equals_a_search_by_hand(vocab_size, capacity):
  rng = np.random.default_rng(vocab_size)
  text = lambda most: rng.integers(0, vocab_size, rng.integers(1, most))
  texts = [text(20) for _ in range(40)]
  # Repetitions that reach the order's whole depth.
  texts += [[0] * 19, np.tile([1, 0], 12)]
  store = store_lib.build(texts, vocab_size=vocab_size, capacity=capacity)
  assert int(store.size) < store.capacity == capacity
  look_up = jax.jit(
    functools.partial(
      store_lib.look_up, max_match=6, num_tokens=5, num_places=1024
    )
  )
  matches, num_ended = set(), 0
  for _ in range(150):
    context = text(_WIDTH)
    found = _find(look_up, store, context)
    expected, matched = _continuations(texts, context, 6, 5)
    assert int(found.matched) == matched
    _check_path(found, expected)
    matches.add(matched)
    num_ended += int(found.tokens[-1]) < 0
  assert len(matches) > 3
  assert 0 < num_ended < 150


def test_the_worked_example():
  # 1 2 occurs four times, followed by 3 1 2 4 1, 4 1 2 3 1, 3 1 2 and nothing.
  text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
  store = store_lib.build([text], vocab_size=5)
  tokens, matched, share = _looked_up(store, text, 2, 6)
  assert (tokens, matched) == ([3, 1, 2, 4, 1, 2], 2)
  of_alive = [(2, 4), (2, 2), (2, 2), (1, 2), (1, 1), (1, 1)]
  expected = [(count - 0.5) / (all + 0.5) for count, all in of_alive]
  np.testing.assert_allclose(share, expected, atol=1e-6)
  # 3 1 2 is followed once by 4 and once by the end.
  tokens, matched, share = _looked_up(store, text, 3, 2)
  assert (tokens, matched) == ([4, 1], 3)
  np.testing.assert_allclose(share, [0.5 / 2.5, 0.5 / 1.5], atol=1e-6)


def test_drafts_end_with_their_text():
  store = store_lib.build([[1, 2, 3], [4, 5]], vocab_size=9, capacity=12)
  # Neither the next text nor the free space after the last one is read.
  assert _looked_up(store, [1, 2], 4, 3)[0] == [3, -1, -1]
  assert _looked_up(store, [4], 4, 3)[0] == [5, -1, -1]
  assert _looked_up(store, [2, 3], 4, 3)[:2] == ([-1] * 3, 2)
  assert _looked_up(store, [4, 5], 4, 3)[:2] == ([-1] * 3, 2)
  # A match doesn't continue from one text into the next.
  assert _looked_up(store, [3, 4], 4, 3)[:2] == ([5, -1, -1], 1)
  assert _looked_up(store, [6], 4, 3)[:2] == ([-1] * 3, 0)


def test_what_is_padding_is_in_no_context():
  store = store_lib.build([[0, 0, 0, 0, 3]], vocab_size=4)
  # The row has one token; its other slots are zeros.
  tokens, matched, _ = _looked_up(store, [0], 4, 1)
  assert (tokens, matched) == ([0], 1)


def test_of_many_places_some_vote_all_over():
  texts = [[0, 1]] * 30 + [[0, 2]] * 10
  store = store_lib.build(texts, vocab_size=3)
  for num_places, count, all in ((64, 30, 40), (40, 30, 40), (4, 3, 4)):
    tokens, _, share = _looked_up(store, [0], 3, 1, num_places=num_places)
    assert tokens == [1]
    expected = (count - 0.5) / (all + 0.5)
    np.testing.assert_allclose(share, [expected], atol=1e-6)


def test_places_are_sorted_by_what_follows():
  rng = np.random.default_rng(0)
  for texts in (
    [rng.integers(0, 3, size) for size in (50, 1, 20)],
    [[2] * 70, [1, 2] * 30],
    [[0]],
  ):
    store = store_lib.build(texts, vocab_size=3, capacity=160)
    size = int(store.size)
    assert size == sum(len(text) + 1 for text in texts)
    order = np.asarray(store.order)[:size]
    assert sorted(order) == list(range(size))
    tokens = np.asarray(store.tokens)
    # Shorter continuations come first, as in a dictionary.
    behind = [tuple(tokens[:size][i : i + 16]) for i in order]
    assert behind == sorted(behind)
    assert np.all(tokens[size:] == _SEPARATOR)


def test_texts_come_back():
  texts = [[3, 1], [0], [], [2, 2, 2]]
  store = store_lib.build(texts, vocab_size=4, capacity=30)
  found = store_lib.texts_of(store)
  assert [text.tolist() for text in found] == [[3, 1], [0], [2, 2, 2]]
  again = store_lib.build(found, vocab_size=4, capacity=30)
  jax.tree.map(np.testing.assert_array_equal, again, store)
  assert store_lib.build(texts, vocab_size=4).capacity == 9


@pytest.mark.parametrize(
  ('capacity', 'kept'), [(13, 3), (12, 2), (8, 2), (7, 1), (3, 1)]
)
def test_beyond_the_capacity_the_oldest_texts_are_dropped(
  caplog, capacity, kept
):
  texts = [[0, 1, 2, 3], [3, 3, 0, 1], [0, 2]]
  store = store_lib.build(texts, vocab_size=4, capacity=capacity)
  found = [text.tolist() for text in store_lib.texts_of(store)]
  assert found == texts[-kept:]
  dropped = f'the first {3 - kept} of 3 texts ({4 * (3 - kept)} tokens) are'
  assert (dropped in caplog.text) == (kept < 3)
  is_there = _looked_up(store, [1, 2], 2, 1)[0] == [3]
  assert is_there == (kept == 3)


@pytest.mark.parametrize(
  ('texts', 'capacity', 'message'),
  [
    ([], None, 'the store has no text: give at least one token'),
    ([[], []], None, 'the store has no text'),
    ([[1], [1, -1, 2]], None, 'text 1 has the token -1, but the target has 4'),
    ([[3, 4]], None, 'text 0 has the token 4, but the target has 4'),
    ([[1, 2, 3], [1, 2]], 2, 'capacity is 2 tokens, but the last text needs 3'),
    ([[1]], 0, 'capacity is 0 tokens, but the last text needs 2'),
  ],
)
def test_what_is_no_store_is_refused(texts, capacity, message):
  with pytest.raises(ValueError, match=message):
    store_lib.build(texts, vocab_size=4, capacity=capacity)


def test_matches_beyond_the_depth_of_the_order_are_refused():
  store = store_lib.build([[0, 1] * 20], vocab_size=2)
  assert _looked_up(store, [0, 1] * 9, 16, 1)[:2] == ([0], 16)
  with pytest.raises(ValueError, match='max_match is 17, but a store is sort'):
    _looked_up(store, [0, 1] * 9, 17, 1)


def test_stores_of_one_capacity_share_an_executable():
  look_up = jax.jit(
    functools.partial(store_lib.look_up, max_match=4, num_tokens=2)
  )
  stores = [
    store_lib.build(texts, vocab_size=5, capacity=32)
    for texts in ([[1, 2, 3, 4]], [[1, 2, 4], [1, 2, 4], [0, 1]])
  ]
  stores.append(store_lib.empty(32))
  found = [_find(look_up, store, [1, 2]) for store in stores]
  assert [x.tokens.tolist() for x in found] == [[3, 4], [4, -1], [-1, -1]]
  assert look_up._cache_size() == 1


def test_ids_that_are_no_integers_are_refused():
  with pytest.raises(
    ValueError, match='text 1 has dtype float64: give token id'
  ):
    store_lib.build([[1, 2], [1.7]], vocab_size=4)
