"""A history of generated texts, as a store that drafts are looked up in."""

from collections.abc import Sequence

import jax
import numpy as np

from specsample import checks
from specsample.memory import store as store_lib
from specsample.types import Array


class History:
  """The latest texts, kept on the host and sorted into a `Store` now and then.

  `generate_all` adds each finished text, so that later rows draft from it. A
  row's tokens keep the target's distribution whatever the store holds, as with
  any drafter; only the number of rounds changes.

  This holds as long as the texts say nothing of the random bits that a row is
  about to use. A call with the key and the request id of an earlier text would
  judge that text by the very bits that wrote it, so it is refused (`claim`).

  One user's texts speed up those of another user with the same words, which can
  be observed from outside: keep one history per user if that matters.
  """

  def __init__(
    self, *, vocab_size: int, capacity: int = 1 << 16, every: int = 2048
  ):
    """Creates an empty history.

    Args:
      vocab_size: V of the target.
      capacity: the number of tokens to keep, counting one more per text; beyond
        it, the oldest texts are dropped. Also the size of the device arrays.
      every: the number of added tokens after which the store is sorted again,
        which takes about a second per million tokens kept.
    """
    for name, value, least in (
      ('vocab_size', vocab_size, 1),
      ('capacity', capacity, 2),
      ('every', every, 1),
    ):
      checks.count(name, value, least)
    self.num_dropped = 0  # texts
    self._vocab_size, self._capacity = vocab_size, capacity
    self._every, self._num_new, self._num_tokens = every, 0, 0
    self._texts: list[np.ndarray] = []
    self._store = store_lib.empty(capacity)
    self._claimed: dict[bytes, np.ndarray] = {}  # request ids by key

  @property
  def store(self) -> store_lib.Store:
    """The store as it was last sorted; its shapes never change."""
    return self._store

  @property
  def vocab_size(self) -> int:
    """V, the number of tokens of the target whose texts it holds."""
    return self._vocab_size

  def claim(self, key: Array, request_ids: Sequence[int]) -> None:
    """Notes the key of a call and the ids of its rows that draw at random.

    Raises:
      ValueError: two rows have the same bits, or an earlier call had a row with
        the same. Nothing is noted then.
    """
    data = np.asarray(jax.random.key_data(key)).tobytes()
    claimed = self._claimed.get(data, np.zeros(0, np.int32))
    together = np.append(claimed, np.asarray(request_ids, np.int32))
    ids, counts = np.unique(together, return_counts=True)
    if np.any(counts > 1):
      raise ValueError(
        f'request {ids[counts > 1][0]} would be drawn twice with the same key, '
        'and a draft from its first text would change the distribution: give '
        'each call a key of its own, such as jax.random.fold_in(key, step), '
        'and each of its requests another id'
      )
    self._claimed[data] = ids

  def add(self, text: Sequence[int] | np.ndarray) -> bool:
    """Adds a text and returns whether there is a new store.

    If a text is longer than the capacity, only its end is kept. The key that
    drew a text is not known here, so it is not refused later: do not decode
    with the key and request id that drew a text which you have added.

    Raises:
      ValueError: the text has a token that the target lacks. It is not added.
    """
    kept = checks.integers('text', text, 'give a list of token ids')
    if kept.size:
      store_lib.check_ids([kept], self._vocab_size)
    kept = kept.astype(np.int32)[1 - self._capacity :]
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
