"""Sums: which are drawn, and what an answer is worth."""

import pytest

from experiments.reinforcement import sums


def test_no_sum_of_training_is_held_out_either_way_round():
  # All 15 sums of numbers up to 5.
  drawn = sums.draw(seed=0, largest=5, train=9, held_out=6)
  both = (*drawn.train, *drawn.held_out)
  assert (len(drawn.train), len(drawn.held_out)) == (9, 6)
  assert len({frozenset((x.first, x.second)) for x in both}) == 15
  assert {x for one in both for x in (one.first, one.second)} == {*range(1, 6)}
  # Either number may come first.
  assert {x.first > x.second for x in both} == {True, False}


def test_a_seed_draws_the_same_sums_and_another_seed_others():
  draw = lambda seed: sums.draw(seed=seed, largest=9, train=20, held_out=5)
  assert draw(1) == draw(1)
  assert draw(1) != draw(2)


def test_too_few_sums_are_refused_by_their_number():
  message = '10 sums to train on and 6 held out are 16, but there are 15 of'
  with pytest.raises(ValueError, match=message):
    sums.draw(seed=0, largest=5, train=10, held_out=6)


@pytest.mark.parametrize(
  ('answer', 'reward'),
  [
    ('42', 1.0),
    ('17 + 25 = 42.', 1.0),
    ('The sum of 17 and 25 is 42!', 1.0),
    ('42.0', 1.0),
    ('42 = 17 + 25', 0.0),  # the last number counts
    ('4.2', 0.0),
    ('0.42', 0.0),
    ('142', 0.0),
    ('forty-two', 0.0),
    ('', 0.0),
  ],
)
def test_an_answer_is_right_if_its_last_number_is_the_sum(answer, reward):
  assert sums.Sum(17, 25).reward(answer) == reward


def test_the_question_names_both_numbers():
  assert sums.Sum(17, 25).question == 'What is 17 + 25?'
