"""The examples that each step of a run learns from, while the data grow.

A run is divided into phases. The first one has the examples that were there
when the run began, and another one begins whenever more have been appended. A
phase begins with the examples that are left of the current epoch, together with
the new ones, and continues with epochs over all of them. So the batch of step i
depends only on the seed, the phases and i, and adding a phase does not change
any step before it.
"""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

# This many batches are sorted by length together, by default.
SORTED_BATCHES = 32


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of a run that learns from a fixed set of examples."""

  first_step: int
  num_examples: int  # the phase learns from the first `num_examples` of all


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
  """The examples of each step, as indices.

  Attributes:
    lengths: [N] of all examples; those in a batch have similar lengths.
    phases: in order; the first one begins at step 0.
    batch_size: examples per step; one batch of an epoch may have fewer.
    sorted_batches: batches whose examples are sorted by length together.
    seed: the seed of the order, which differs from epoch to epoch.
  """

  lengths: np.ndarray
  phases: Sequence[Phase]
  batch_size: int
  sorted_batches: int = SORTED_BATCHES
  seed: int = 0

  def __getitem__(self, step: int) -> np.ndarray:
    """Returns the indices of the examples that a step learns from."""
    number = max(
      i for i, phase in enumerate(self.phases) if phase.first_step <= step
    )
    epoch, index = self._place(number, step)
    return self._epoch(number, epoch)[index]

  def _place(self, number: int, step: int) -> tuple[int, int]:
    """Returns a step's epoch within its phase, and its batch in that epoch."""
    offset = step - self.phases[number].first_step
    first = len(self._epoch(number, 0))
    if offset < first:
      return 0, offset
    size = -(-self.phases[number].num_examples // self.batch_size)
    epoch, index = divmod(offset - first, size)
    return 1 + epoch, index

  @functools.lru_cache(maxsize=4)  # noqa: B019 (lives as long as the run)
  def _epoch(self, number: int, epoch: int) -> list[np.ndarray]:
    """Returns an epoch's batches; epoch 0 completes the previous phase's."""
    count = self.phases[number].num_examples
    if epoch or not number:
      examples = np.arange(count)
    else:
      before = self.phases[number - 1].num_examples
      unseen = self._left(number - 1, self.phases[number].first_step)
      examples = np.concatenate([unseen, np.arange(before, count)])
    rng = np.random.default_rng([self.seed, number, epoch])
    order = rng.permutation(examples)
    together = self.sorted_batches * self.batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(order), together):
      part = by_length(order[start : start + together], self.lengths)
      batches += np.split(
        part, range(self.batch_size, len(part), self.batch_size)
      )
    return [batches[i] for i in rng.permutation(len(batches))]

  def _left(self, number: int, step: int) -> np.ndarray:
    """Returns the examples that a phase's epoch has left at a step, sorted."""
    epoch, index = self._place(number, step)
    return np.sort(np.concatenate(self._epoch(number, epoch)[index:]))


def by_length(indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Returns the indices sorted by the lengths of their examples."""
  return indices[np.argsort(lengths[indices], kind='stable')]
