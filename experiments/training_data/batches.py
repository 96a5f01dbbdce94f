"""Batches of dialogues, one per training step, shuffled with a seed.

The batch of step i depends only on the seed and i, so a run that was killed
reads the same batches when it continues. A row holds one dialogue, and the rows
of a batch have similar lengths; or rows of a fixed length are packed with the
dialogues of a step (see `specsample.training.rows`).
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.training_data.data_folder import Dialogue
from specsample import settings
from specsample import sharding

# This many batches are sorted by length together, by default.
SORTED_BATCHES = 32
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

  def cut(self, length: int) -> 'Example':
    """Returns the first `length` tokens."""
    return Example(
      tokens=self.tokens[:length],
      answers=tuple(
        (start, min(end, length))
        for start, end in self.answers
        if start < length
      ),
      vectors={name: found[:length] for name, found in self.vectors.items()},
    )


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


class Place(NamedTuple):
  """Where the first token of a dialogue is in a batch."""

  row: int
  start: int


def _one_per_row(rows: Sequence[Example]) -> list[Place]:
  return [Place(i, 0) for i in range(len(rows))]


def first_fit(sizes: Sequence[int], length: int) -> list[Place]:
  """Returns the places of dialogues in as few rows as a simple rule finds.

  The longest come first, each in the first row that has room for its size. This
  takes at most 11/9 of the fewest possible rows, and one more (Johnson, 1973).
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batches(settings.Settings):
  """The batches of an endless run over some examples.

  A batch is {'tokens': [B, T] int32, 'mask': [B, T] bool}, where `mask` marks
  the tokens of answers, and it has the vectors of the examples, [B, T, ...]
  bfloat16. The batch of a step also has `places` [B, A] int32 if the answers
  span fewer than T tokens, see `specsample.training.rows.crop`. Rows that
  only fill up a batch are masked out.

  T is a multiple of `width_multiple`, which limits the number of shapes, and at
  most `max_length`; longer examples are cut off.

  With a `packed_length`, the batch of a step has as many rows of that many
  tokens as its `batch_size` examples need, and `starts` [B, D] int32. The mesh
  can divide the rows of each of `num_parts` parts.

  `sorted_batches` is how many batches are sorted by length together. With 1,
  batches are random: then packed ones need about equally many rows.
  """

  examples: Sequence[Example]
  batch_size: settings.Count
  max_length: int = 512
  width_multiple: settings.Count = 64
  packed_length: int | None = None
  num_parts: int = 1
  sorted_batches: int = SORTED_BATCHES
  seed: int = 0

  def _check(self):
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
    epoch, number = divmod(step, self.per_epoch)
    rows = self._rows(self._epoch(epoch)[number])
    length = self.packed_length
    if length is None:
      places = _one_per_row(rows)
      return self._with_places(self._batch(rows, places), places)
    places = first_fit([row.tokens.size for row in rows], length)
    parts = self.num_parts * sharding.batch_parts()
    num_rows = -(-(1 + max(place.row for place in places)) // parts) * parts
    batch = self._batch(rows, places, (num_rows, length))
    batch['starts'] = _starts(places, num_rows, length)
    return self._with_places(batch, places)

  def once(self) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches with each example once, shortest first, to evaluate."""
    order = self._by_length(self._usable)
    for start in range(0, len(order), self.batch_size):
      rows = self._rows(order[start : start + self.batch_size])
      yield self._batch(rows, _one_per_row(rows))

  @functools.cached_property
  def _usable(self) -> np.ndarray:
    """The examples of which an answer begins within `max_length`, by index."""
    return np.asarray(
      [
        i
        for i, example in enumerate(self.examples)
        if example.answers[0][0] < self.max_length
      ],
      int,
    )

  @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the run)
  def _epoch(self, number: int) -> list[np.ndarray]:
    """Returns the examples of each batch of an epoch, by index."""
    rng = np.random.default_rng([self.seed, 0, number])
    order = self._usable[rng.permutation(len(self._usable))]
    together = self.sorted_batches * self.batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(order), together):
      part = self._by_length(order[start : start + together])
      batches += np.split(
        part, range(self.batch_size, len(part), self.batch_size)
      )
    return [batches[i] for i in rng.permutation(len(batches))]

  def _by_length(self, indices: np.ndarray) -> np.ndarray:
    lengths = [self.examples[i].tokens.size for i in indices]
    return indices[np.argsort(lengths, kind='stable')]

  def _rows(self, indices: np.ndarray) -> list[Example]:
    return [self.examples[i].cut(self.max_length) for i in indices]

  def _with_places(self, batch, places):
    """Adds `places` to the batch if that makes it narrower."""
    num_rows, size = batch['tokens'].shape
    spans: list[list[int]] = [[] for _ in range(num_rows)]
    ends = [*places, *(Place(row, size) for row in range(num_rows))]
    for row, start in sorted(places):
      end = min(p.start for p in ends if p.row == row and p.start > start)
      learned = start + np.flatnonzero(batch['mask'][row, start:end])
      first = max(learned[0] - _BEFORE_ANSWER, start)
      spans[row] += range(first, learned[-1] + 1)
    width = max(map(len, spans))
    width = -(-width // self.width_multiple) * self.width_multiple
    if width >= size:
      return batch
    # The places after a span fill its row, and are not learned.
    filled = [
      [*span, *range(last := max(span, default=-1) + 1, last + width)][:width]
      for span in spans
    ]
    return batch | {'places': np.asarray(filled, np.int32)}

  def _batch(
    self,
    rows: Sequence[Example],
    places: Sequence[Place],
    shape: tuple[int, int] | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch; its shape is by default that of one example per row."""
    if shape is None:
      longest = max(row.tokens.size for row in rows)
      width = -(-longest // self.width_multiple) * self.width_multiple
      shape = self.batch_size, min(width, self.max_length)
    batch = {'tokens': np.zeros(shape, np.int32), 'mask': np.zeros(shape, bool)}
    for name, found in rows[0].vectors.items():
      batch[name] = np.zeros((*shape, *found.shape[1:]), jnp.bfloat16)
    for example, (row, first) in zip(rows, places, strict=True):
      of_row = slice(first, first + example.tokens.size)
      batch['tokens'][row, of_row] = example.tokens
      for start, end in example.answers:
        batch['mask'][row, first + start : first + end] = True
      for name, found in example.vectors.items():
        batch[name][row, of_row] = found
    return batch


def _starts(places: Sequence[Place], num_rows: int, length: int) -> np.ndarray:
  """Returns the `starts` of packed rows; few widths, to limit the shapes."""
  of_rows: list[list[int]] = [[] for _ in range(num_rows)]
  for row, start in sorted(places):
    of_rows[row].append(start)
  width = 1 << (max(map(len, of_rows)) - 1).bit_length()
  found = np.full((num_rows, width), length, np.int32)
  for row, starts in enumerate(of_rows):
    found[row, : len(starts)] = starts
  return found
