"""Prompt lookup: which occurrence is continued, and how far."""

import jax.numpy as jnp
import numpy as np
import pytest

from specsample import drafters


def propose(sequence, num_draft_tokens=4, padding=8, **kwargs):
  drafter = drafters.Ngram(num_draft_tokens=num_draft_tokens, **kwargs)
  tokens = jnp.asarray([list(sequence) + [0] * padding])
  length = jnp.asarray([len(sequence)])
  draft, _ = drafter.propose({}, None, None, tokens, length, ())
  return draft.tokens[0].tolist()


def test_continues_the_longest_match():
  # 1 2 ends the sequence; 9 1 2 is the longer match, though an earlier one.
  sequence = [9, 1, 2, 5, 6, 7, 8, 1, 2, 3, 9, 1, 2]
  assert propose(sequence, max_ngram=3) == [5, 6, 7, 8]
  assert propose(sequence, max_ngram=2) == [3, 9, 1, 2]


def test_latest_of_equal_matches_wins():
  assert propose([1, 2, 3, 4, 1, 2, 5, 6, 1, 2])[:2] == [5, 6]


def test_without_a_match_nothing_is_drafted():
  assert propose([1, 2, 3, 4]) == [-1] * 4
  assert propose([1, 2, 1], min_ngram=2) == [-1] * 4
  assert propose([1, 2, 1], min_ngram=1) == [2, 1, 2, 1]
  assert propose([1], min_ngram=1) == [-1] * 4


def test_copy_goes_on_into_its_own_draft():
  assert propose([7, 1, 2, 3, 1, 2, 3], num_draft_tokens=5) == [1, 2, 3, 1, 2]
  assert propose([4, 4, 4], num_draft_tokens=3) == [4, 4, 4]


def test_padding_is_never_read():
  assert propose([0, 3, 5, 0], min_ngram=1, padding=20) == [3, 5, 0, 3]
  assert propose([3, 0], min_ngram=1, padding=20) == [-1] * 4


def brute_force(sequence, num_draft_tokens, max_ngram, min_ngram):
  for n in range(min(max_ngram, len(sequence) - 1), min_ngram - 1, -1):
    for start in range(len(sequence) - 1, n - 1, -1):
      if sequence[start - n : start] == sequence[-n:]:
        extended = list(sequence)
        for i in range(num_draft_tokens):
          extended.append(extended[start + i])
        return extended[len(sequence) :]
  return [-1] * num_draft_tokens


@pytest.mark.parametrize('seed', range(40))
def test_equals_a_search_by_hand(seed):
  rng = np.random.default_rng(seed)
  sequence = rng.integers(0, 3, size=rng.integers(1, 20)).tolist()
  sizes = {'max_ngram': int(rng.integers(2, 6)), 'min_ngram': 2}
  expected = brute_force(sequence, 4, **sizes)
  assert propose(sequence, **sizes) == expected


def test_refuses_an_empty_range():
  with pytest.raises(ValueError, match='min_ngram is 3 and max_ngram 2'):
    drafters.Ngram(num_draft_tokens=2, max_ngram=2, min_ngram=3)
