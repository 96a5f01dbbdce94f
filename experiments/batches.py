"""Dialogues as batches of one step each, shuffled by a seed.

Step i of a run is batch i, whatever was read before: a run that goes on after
a kill takes up where it was. A row holds one dialogue, because a model's pass
has no mask between two; rows of a batch are of similar length instead.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools

import numpy as np

from experiments.dialogues import Dialogue

# So many batches are sorted by length together.
_SORTED_TOGETHER = 32


@dataclasses.dataclass(frozen=True)
class Batch:
  """One step's tokens; a row of length 0 only fills up the batch."""

  tokens: np.ndarray  # [B, T] int32, 0 after a row's length
  length: np.ndarray  # [B] int32
  is_answer: np.ndarray  # [B, T] bool, the tokens that are to be predicted


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
  """The batches of an endless run over some dialogues.

  T is a multiple of `width_multiple`, so that there are few shapes, up to
  `max_length`, where longer dialogues are cut off.
  """

  dialogues: Sequence[Dialogue]
  batch_size: int
  max_length: int = 512
  width_multiple: int = 64
  seed: int = 0

  def __post_init__(self):
    """Refuses sizes that hold nothing.

    Raises:
      ValueError: names the value; or no answer begins below `max_length`.
    """
    if min(self.batch_size, self.width_multiple) < 1:
      raise ValueError(
        f'batch_size is {self.batch_size} and width_multiple '
        f'{self.width_multiple}: give at least 1'
      )
    if not self._usable:
      raise ValueError(
        f'no answer of {len(self.dialogues)} dialogues begins within '
        f'max_length, {self.max_length} tokens: raise it, or make more data'
      )

  @property
  def per_epoch(self) -> int:
    """Batches until each dialogue has been seen once."""
    return -(-len(self._usable) // self.batch_size)

  def __getitem__(self, step: int) -> Batch:
    """The batch of a step, from 0; in each epoch another order."""
    epoch, index = divmod(step, self.per_epoch)
    return self._batch(self._epoch(epoch)[index])

  def once(self) -> Iterator[Batch]:
    """Each dialogue once, from the shortest on: to evaluate."""
    order = self._by_length(np.asarray(self._usable))
    for start in range(0, len(order), self.batch_size):
      yield self._batch(order[start : start + self.batch_size])

  @functools.cached_property
  def _usable(self) -> list[int]:
    return [
      i
      for i, dialogue in enumerate(self.dialogues)
      if dialogue.answer < self.max_length
    ]

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, epoch: int) -> list[np.ndarray]:
    """The dialogues of each batch."""
    rng = np.random.default_rng([self.seed, epoch])
    order = rng.permutation(self._usable)
    together = _SORTED_TOGETHER * self.batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(order), together):
      part = self._by_length(order[start : start + together])
      batches += np.split(
        part, range(self.batch_size, len(part), self.batch_size)
      )
    return [batches[i] for i in rng.permutation(len(batches))]

  def _by_length(self, indices: np.ndarray) -> np.ndarray:
    lengths = [self.dialogues[i].tokens.size for i in indices]
    return indices[np.argsort(lengths, kind='stable')]

  def _batch(self, indices: np.ndarray) -> Batch:
    rows = [self.dialogues[i] for i in indices]
    longest = max(row.tokens.size for row in rows)
    width = -(-longest // self.width_multiple) * self.width_multiple
    width = min(width, self.max_length)
    tokens = np.zeros((self.batch_size, width), np.int32)
    is_answer = np.zeros(tokens.shape, bool)
    length = np.zeros(self.batch_size, np.int32)
    for i, row in enumerate(rows):
      length[i] = min(row.tokens.size, width)
      tokens[i, : length[i]] = row.tokens[: length[i]]
      is_answer[i, row.answer : length[i]] = True
    return Batch(tokens, length, is_answer)
