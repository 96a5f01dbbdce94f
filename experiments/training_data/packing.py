"""Places of several dialogues in rows of a fixed length."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
  """Where the first token of a dialogue is in a batch."""

  row: int
  start: int


def one_per_row(count: int) -> list[Place]:
  """Returns the places of dialogues that have a row each."""
  return [Place(row, 0) for row in range(count)]


def first_fit(sizes: Sequence[int], length: int) -> list[Place]:
  """Returns the places of dialogues in as few rows as a simple rule finds.

  The longest come first, each in the first row that has room. This takes at
  most 11/9 of the fewest possible rows, and one more (Johnson, 1973).

  Args:
    sizes: the number of tokens of each dialogue.
    length: of a row.
  """
  if max(sizes, default=0) > length:
    raise ValueError(
      f'a dialogue has {max(sizes)} tokens, but a row has room for {length}: '
      'give longer rows, or cut dialogues'
    )
  places = [Place(0, 0)] * len(sizes)
  used: list[int] = []
  for i in np.argsort(-np.asarray(sizes), kind='stable'):
    size = sizes[i]
    row = next((r for r, n in enumerate(used) if n + size <= length), None)
    if row is None:
      row = len(used)
      used.append(0)
    places[i] = Place(row, used[row])
    used[row] += size
  return places
