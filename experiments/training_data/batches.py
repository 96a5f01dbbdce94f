"""Dialogues as batches of one step each, shuffled by a seed.

Step i of a run reads batch i, whatever was read before, so that a run which
goes on after a kill takes up where it was (`schedule`). A row holds one
dialogue, because a model's pass has no mask between two; rows of a batch are of
similar length instead.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from experiments.training_data import schedule
from experiments.training_data.dialogues import Dialogue

# What heads read of the tokens before an answer.
_BEFORE_ANSWER = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """A dialogue as it is learned."""

  tokens: np.ndarray  # [n] int32
  answers: tuple[tuple[int, int], ...]  # slices of `tokens`, in order
  # The target's, [n, ...] bfloat16 each, those that are at hand.
  vectors: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def learned(self) -> np.ndarray:
    """The tokens of the answers, [m] int32."""
    return np.concatenate([self.tokens[slice(*span)] for span in self.answers])


def example(
  dialogue: Dialogue, vectors: Mapping[str, np.ndarray], whole: bool
) -> Example:
  """Returns a dialogue as an example, with the vectors [n, ...] at hand.

  Unless the `whole` dialogue is read, the example begins where heads draft the
  first answer's first token: they are given the token before it, and the vector
  of the token before that.
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
  """Rows of tokens as an array [batch_size, T] int32, 0 where there is none."""
  longest = max(row.size for row in rows)
  width = -(-longest // width_multiple) * width_multiple
  tokens = np.zeros((batch_size, width), np.int32)
  for i, row in enumerate(rows):
    tokens[i, : row.size] = row
  return tokens


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
  """The batches of an endless run over some examples.

  A batch is {'tokens': [B, T] int32, 'mask': [B, T] bool}, where `mask` is set
  for the tokens of answers, and has the vectors that the examples have, [B, T,
  ...] bfloat16. Where that is narrower it has `places` [B, A] int32 too, see
  `specsample.training.objective.crop`. Rows that fill it up are masked whole.

  T is a multiple of `width_multiple`, so that there are few shapes, up to
  `max_length`, where longer examples are cut off.

  `phases` says from which step on how many of the examples are learned from;
  by default all of them from the first step on.
  """

  examples: Sequence[Example]
  batch_size: int
  max_length: int = 512
  width_multiple: int = 64
  seed: int = 0
  phases: Sequence[schedule.Phase] | None = None

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
    if not self._usable.size:
      raise ValueError(
        f'no answer of {len(self.examples)} dialogues begins within '
        f'max_length, {self.max_length} tokens: raise it, or make more data'
      )

  @property
  def per_epoch(self) -> int:
    """Batches until each example has been seen once."""
    return -(-len(self._usable) // self.batch_size)

  @property
  def answer_tokens(self) -> int:
    """Tokens to learn in an epoch."""
    limit = self.max_length
    return sum(
      max(min(end, limit) - start, 0)
      for i in self._usable
      for start, end in self.examples[i].answers
    )

  def __getitem__(self, step: int) -> dict[str, np.ndarray]:
    """The batch of a step, from 0; in each epoch another order."""
    return self._with_places(self._batch(self._usable[self._schedule[step]]))

  def once(self) -> Iterator[dict[str, np.ndarray]]:
    """Each example once, from the shortest on: to evaluate."""
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
    """Returns the batch with the places from its first answers to its last."""
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
