"""Batches of dialogues, one per training step, shuffled with a seed.

Step i of a run reads batch i, whatever was read before, so a run that was
killed continues where it stopped (see `schedule`). A row holds one dialogue,
because the model has no mask that would separate two; instead, the rows of a
batch have similar lengths.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from experiments.training_data import schedule
from experiments.training_data.dialogues import Dialogue

# The number of tokens before an answer that heads read.
_BEFORE_ANSWER = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """A dialogue as training reads it."""

  tokens: np.ndarray  # [n] int32
  answers: tuple[tuple[int, int], ...]  # slices of `tokens`, in order
  # The target's vectors by name, [n, ...] bfloat16 each; empty if not stored.
  vectors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def learned(self) -> np.ndarray:
    """The tokens of the answers, [m] int32."""
    return np.concatenate([self.tokens[slice(*span)] for span in self.answers])


def example(
  dialogue: Dialogue, vectors: Mapping[str, np.ndarray], whole: bool
) -> Example:
  """Returns an example of a dialogue and its stored vectors [n, ...].

  Unless the `whole` dialogue is read, the example begins where heads start to
  draft the first answer: for its first token they are given the token before
  it, and the vector of the token before that.
  """
  first, _ = dialogue.answers[0]
  start = 0 if whole else max(first - _BEFORE_ANSWER, 0)
  return Example(
    tokens=dialogue.tokens[start:],
    answers=tuple(
      (begin - start, end - start) for begin, end in dialogue.answers
    ),
    vectors={name: found[start:] for name, found in vectors.items()},
  )


def pad(
  rows: Sequence[np.ndarray], batch_size: int, width_multiple: int
) -> np.ndarray:
  """Returns rows of tokens as an array [batch_size, T] int32, padded with 0."""
  longest = max(row.size for row in rows)
  width = -(-longest // width_multiple) * width_multiple
  tokens = np.zeros((batch_size, width), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : row.size] = row
  return tokens


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
  """The batches of an endless run over some examples.

  A batch is {'tokens': [B, T] int32, 'mask': [B, T] bool}, where `mask` marks
  the tokens of answers, and it has the vectors of the examples, [B, T, ...]
  bfloat16. The batch of a step also has `places` [B, A] int32 if the answers
  span fewer than T tokens, see `specsample.training.objective.crop`. Rows that
  only fill up a batch are masked out.

  T is a multiple of `width_multiple`, which limits the number of shapes, and at
  most `max_length`; longer examples are cut off.

  `phases` says how many of the examples are learned from, and from which step
  on; by default all of them, from step 0.
  """

  examples: Sequence[Example]
  batch_size: int
  max_length: int = 512
  width_multiple: int = 64
  seed: int = 0
  phases: Sequence[schedule.Phase] | None = None

  def __post_init__(self):
    """Checks the sizes.

    Raises:
      ValueError: if a size is below 1 (the message names it), or no answer
        begins within `max_length`.
    """
    if min(self.batch_size, self.width_multiple) < 1:
      raise ValueError(
        f'batch_size is {self.batch_size} and width_multiple '
        f'{self.width_multiple}: give at least 1'
      )
    if not self._usable.size:
      raise ValueError(
        f'no answer in {len(self.examples)} dialogues begins within '
        f'max_length, {self.max_length} tokens: raise it, or make more data'
      )

  @property
  def per_epoch(self) -> int:
    """The number of batches that show each example once."""
    return -(-len(self._usable) // self.batch_size)

  @property
  def answer_tokens(self) -> int:
    """The number of answer tokens in an epoch."""
    limit = self.max_length
    return sum(
      max(min(end, limit) - start, 0)
      for i in self._usable
      for start, end in self.examples[i].answers
    )

  def __getitem__(self, step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, from 0; the order differs in each epoch."""
    return self._with_places(self._batch(self._usable[self._schedule[step]]))

  def once(self) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches with each example once, shortest first, to evaluate."""
    order = schedule.by_length(
      np.arange(len(self._usable)), self._schedule.lengths
    )
    for start in range(0, len(order), self.batch_size):
      yield self._batch(self._usable[order[start : start + self.batch_size]])

  @functools.cached_property
  def _usable(self) -> np.ndarray:
    return np.asarray(
      [
        i
        for i, example in enumerate(self.examples)
        if example.answers[0][0] < self.max_length
      ],
      int,
    )

  @functools.cached_property
  def _schedule(self) -> schedule.Schedule:
    """Returns the schedule of the examples, by their index in `_usable`."""
    count = lambda n: int(np.searchsorted(self._usable, n))
    whole = [schedule.Phase(0, len(self.examples))]
    return schedule.Schedule(
      lengths=np.asarray([self.examples[i].tokens.size for i in self._usable]),
      phases=[
        schedule.Phase(phase.first_step, count(phase.num_examples))
        for phase in self.phases or whole
      ],
      batch_size=self.batch_size,
      seed=self.seed,
    )

  def _with_places(self, batch):
    """Adds `places` to the batch if that makes it narrower."""
    mask = batch['mask']
    starts = np.maximum(mask.argmax(axis=1) - _BEFORE_ANSWER, 0)
    ends = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
    sizes = np.where(mask.any(axis=1), ends - starts, 0)
    width = -(-sizes.max() // self.width_multiple) * self.width_multiple
    if width >= mask.shape[1]:
      return batch
    places = starts[:, None] + np.arange(width)
    return batch | {'places': places.astype(np.int32)}

  def _batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    rows = [self.examples[i] for i in indices]
    tokens = pad(
      [row.tokens[: self.max_length] for row in rows],
      self.batch_size,
      self.width_multiple,
    )[:, : self.max_length]
    batch = {'tokens': tokens, 'mask': np.zeros(tokens.shape, bool)}
    for name, found in rows[0].vectors.items():
      shape = (*tokens.shape, *found.shape[1:])
      batch[name] = np.zeros(shape, jnp.bfloat16)
    for i, row in enumerate(rows):
      length = min(row.tokens.size, tokens.shape[1])
      for start, end in row.answers:
        batch['mask'][i, start : min(end, length)] = True
      for name, found in row.vectors.items():
        batch[name][i, :length] = found[:length]
    return batch
