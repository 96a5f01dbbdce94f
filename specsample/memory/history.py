"""What was generated so far, as a store that drafts are looked up in."""

from collections.abc import Sequence

import numpy as np

from specsample.memory import store as store_lib


class History:
  """The latest texts, kept on the host and sorted into a `Store` now and then.

  `generate_all` adds what finished, so that later rows draft from it. That
  anticipates nothing: a row's tokens keep the target's distribution whatever
  the store holds, and only the number of rounds changes. (At temperatures above
  0 the tokens drawn under one key may differ from those without a history, as
  with another drafter; `verify.coupled` and temperature 0 give the same ones.)

  Texts of one user speed up those of another with the same words, which can be
  told from outside: keep a history per user where that matters.
  """

  def __init__(
    self, *, vocab_size: int, capacity: int = 1 << 16, every: int = 2048
  ):
    """Begins with no text.

    Args:
      vocab_size: V of the target.
      capacity: tokens that are kept, one more counted per text; of more, the
        oldest texts are dropped. Also the size of the arrays on the device.
      every: tokens that are added before the store is sorted again, which takes
        about a second per million tokens kept.

    Raises:
      ValueError: a number below 1.
    """
    for name, value in (('capacity', capacity), ('every', every)):
      if value < 1:
        raise ValueError(f'{name} is {value}: give at least 1 token')
    self.num_dropped = 0  # texts
    self._vocab_size, self._capacity = vocab_size, capacity
    self._every, self._num_new, self._num_tokens = every, 0, 0
    self._texts: list[np.ndarray] = []
    self._store = store_lib.empty(capacity)

  @property
  def store(self) -> store_lib.Store:
    """The store as it was last sorted; always of the same shapes."""
    return self._store

  def add(self, text: Sequence[int]) -> bool:
    """Adds a text; returns whether there is a new store.

    Of a text that is longer than the capacity its end is kept.
    """
    kept = np.asarray(text, np.int32)[1 - self._capacity :]
    if not kept.size:
      return False
    self._texts.append(kept)
    self._num_new += kept.size
    self._num_tokens += kept.size + 1
    while self._num_tokens > self._capacity:
      self._num_tokens -= self._texts.pop(0).size + 1
      self.num_dropped += 1
    if self._num_new < self._every:
      return False
    self._num_new = 0
    self._store = store_lib.build(
      self._texts, vocab_size=self._vocab_size, capacity=self._capacity
    )
    return True
