"""Sums to learn by reinforcement, and the reward of an answer."""

import dataclasses
import re

import numpy as np

# So that the last number of "17 + 25 = 42." is 42, and that of 4.2 is not 2.
_NUMBER = re.compile(r'\d+(?:\.\d+)?')


@dataclasses.dataclass(frozen=True)
class Sum:
  """A question for the sum of two numbers."""

  first: int
  second: int

  @property
  def question(self) -> str:
    """The user's turn of a chat."""
    return f'What is {self.first} + {self.second}?'

  def reward(self, answer: str) -> float:
    """Returns 1 if the last number of the answer is the sum, else 0."""
    numbers = _NUMBER.findall(answer)
    is_right = bool(numbers) and float(numbers[-1]) == self.first + self.second
    return float(is_right)


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums to train on, and others that are held out."""

  train: tuple[Sum, ...]
  held_out: tuple[Sum, ...]


def draw(*, seed: int, largest: int, train: int, held_out: int) -> Sums:
  """Draws different sums of numbers from 1 to `largest`.

  Two numbers are in one sum at most, whichever comes first: if 3 + 4 is in
  training, 4 + 3 is not held out.

  Raises:
    ValueError: there are not as many sums.
  """
  pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, a + 1)]
  wanted = train + held_out
  if wanted > len(pairs):
    raise ValueError(
      f'{train} sums to train on and {held_out} held out are {wanted}, but '
      f'there are {len(pairs)} of numbers up to {largest}: give fewer sums, or '
      'larger numbers'
    )
  rng = np.random.default_rng(seed)
  chosen = rng.permutation(len(pairs))[:wanted]
  # Which of the two numbers comes first.
  turned = rng.random(wanted) < 0.5
  sums = [
    Sum(*(pairs[i][::-1] if is_turned else pairs[i]))
    for i, is_turned in zip(chosen, turned, strict=True)
  ]
  return Sums(train=tuple(sums[:train]), held_out=tuple(sums[train:]))
