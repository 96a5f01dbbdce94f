"""The examples that each step of a run learns from, epoch after epoch.

The batch of step i depends only on the seed and i, so a run that was killed
reads the same batches when it continues.
"""

import dataclasses
import functools

import numpy as np

# This many batches are sorted by length together, by default.
SORTED_BATCHES = 32


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
  """The examples of each step, as indices.

  Attributes:
    lengths: [N] of all examples; those in a batch have similar lengths.
    batch_size: examples per step; one batch of an epoch may have fewer.
    sorted_batches: batches whose examples are sorted by length together.
    seed: the seed of the order, which differs from epoch to epoch.
  """

  lengths: np.ndarray
  batch_size: int
  sorted_batches: int = SORTED_BATCHES
  seed: int = 0

  def __getitem__(self, step: int) -> np.ndarray:
    """Returns the indices of the examples that a step learns from."""
    epoch, index = divmod(step, -(-len(self.lengths) // self.batch_size))
    return self._epoch(epoch)[index]

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, epoch: int) -> list[np.ndarray]:
    """Returns the batches of an epoch."""
    rng = np.random.default_rng([self.seed, 0, epoch])
    order = rng.permutation(len(self.lengths))
    together = self.sorted_batches * self.batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(order), together):
      part = by_length(order[start : start + together], self.lengths)
      batches += np.split(
        part, range(self.batch_size, len(part), self.batch_size)
      )
    return [batches[i] for i in rng.permutation(len(batches))]


def by_length(indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Returns the indices sorted by the lengths of their examples."""
  return indices[np.argsort(lengths[indices], kind='stable')]
