"""Filters for duplicates, loops and the texts of a test set."""

import numpy as np
import pytest

from experiments.training_data import filters

_LONG = (
  'A farmer has seventeen sheep, and all but nine of them run away in the night'
)


@pytest.mark.parametrize(
  'other',
  ['what is the capital of france', ' What is  the capital of FRANCE?!\n'],
)
def test_case_space_and_punctuation_do_not_tell_texts_apart(other):
  text = 'What is the capital of France?'
  assert filters.digest(other) == filters.digest(text)


@pytest.mark.parametrize('other', ['What is the capital of Spain?', '', '?'])
def test_other_words_do(other):
  assert filters.digest(other) != filters.digest('the capital of France?')


def test_texts_without_words_are_told_apart():
  assert filters.digest('1 + ?') != filters.digest('1 - 2')
  assert filters.digest('🙂') != filters.digest('🙁')


def test_repeated_share_by_hand():
  # 1234 2341 3412 4123 1234 2341: two of six have occurred before.
  tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1]
  assert filters.repeated_share(tokens) == pytest.approx(2 / 6)
  assert filters.repeated_share([1, 2, 3]) == 0


@pytest.mark.parametrize('period', [1, 2, 7, 30])
def test_a_period_is_a_loop(period):
  rng = np.random.default_rng(period)
  start = rng.integers(1000, size=50).tolist()
  assert not filters.loops(start)
  looping = start + start[:period] * (120 // period)
  assert filters.loops(looping)
  assert filters.loop(start) is None
  size = filters.loop(looping)
  assert 50 < size <= len(looping) and size % 8 == 0
  assert filters.loops(looping[:size]) and not filters.loops(
    looping[: size - 8]
  )


def test_a_text_that_repeats_little_is_none():
  rng = np.random.default_rng(0)
  # A list in which every line begins with the same four words.
  lines = rng.integers(1000, size=(9, 12))
  lines[:, :4] = [1, 2, 3, 4]
  assert not filters.loops(lines.ravel().tolist())
  assert not filters.loops([5] * 20)  # too short to tell


@pytest.mark.parametrize(
  ('text', 'is_excluded'),
  [
    ('who am I', True),  # the same words
    ('Who am I, and who are you?', False),  # contains a short excluded text
    (_LONG.upper(), True),
    (f'Please solve this. {_LONG}. How many are left?', True),
    (' '.join(_LONG.split()[:13]), True),
    (' '.join(_LONG.split()[:12]), False),
    (' '.join(reversed(_LONG.split())), False),
    ('', False),
  ],
)
def test_a_text_of_the_test_set_is_excluded(text, is_excluded):
  assert (text in filters.Exclusion(['Who am I?', _LONG])) == is_excluded


def test_nothing_excludes_nothing():
  assert _LONG not in filters.Exclusion([])
