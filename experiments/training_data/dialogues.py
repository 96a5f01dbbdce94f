"""Dialogues to train on, as token ids, and the shards that hold them."""

from collections.abc import Iterable, Sequence
import dataclasses
import enum
import io

import numpy as np


class Source(enum.IntEnum):
  """Who wrote the user's turns and the answers."""

  SAMPLED = 0  # the target wrote all of it
  OPENED = 1  # the target wrote all but the first words of the user's turn
  PROMPT = 2  # the user's turns are from a file, the target answered them
  ENGINE = 3  # the same, but the target ran in another engine
  TEXT = 4  # all of it is from a file; the target did not write the answers


@dataclasses.dataclass(frozen=True, eq=False)
class Dialogue:
  """A conversation, and the answers in it that are trained on."""

  tokens: np.ndarray  # [n] int32, chat template included
  # The slices of `tokens` that hold the answers, in order. The last answer ends
  # where `tokens` ends.
  answers: tuple[tuple[int, int], ...]
  # The answers' temperature: 0 if the target wrote them greedily, NaN if it is
  # unknown or the target did not write them.
  temperature: float
  source: Source
  turn: int  # `filters.digest` of the first user turn, 64 bits

  @property
  def answer_tokens(self) -> int:
    """The number of tokens in the answers."""
    return sum(end - start for start, end in self.answers)


def append(dialogues: list[Dialogue], longer: Dialogue) -> None:
  """Adds a dialogue that continues the last one in `dialogues`.

  Replaces the last one if the tokens of the longer dialogue begin with all of
  its tokens. Otherwise the template renders an old answer differently once
  there is a later one (it may drop the thinking), and both are kept.
  """
  before = dialogues[-1] if dialogues else None
  if before is not None and np.array_equal(
    longer.tokens[: before.tokens.size], before.tokens
  ):
    del dialogues[-1]
    answers = before.answers + longer.answers
    longer = dataclasses.replace(longer, answers=answers)
  dialogues.append(longer)


def answer_tokens(dialogues: Iterable[Dialogue]) -> int:
  """Returns the total number of tokens in the answers."""
  return sum(dialogue.answer_tokens for dialogue in dialogues)


def encode(dialogues: Sequence[Dialogue]) -> bytes:
  """Returns the content of a shard; equal dialogues give equal bytes."""
  spans = [span for dialogue in dialogues for span in dialogue.answers]
  tokens = [dialogue.tokens for dialogue in dialogues]
  content = io.BytesIO()
  np.savez_compressed(
    content,
    tokens=np.concatenate([np.zeros(0, np.int32), *tokens]),
    length=np.asarray([x.tokens.size for x in dialogues], np.int32),
    answers=np.asarray(spans, np.int32).reshape(-1, 2),
    num_answers=np.asarray([len(x.answers) for x in dialogues], np.int32),
    temperature=np.asarray([x.temperature for x in dialogues], np.float32),
    source=np.asarray([x.source for x in dialogues], np.int8),
    turn=np.asarray([x.turn for x in dialogues], np.uint64),
  )
  return content.getvalue()


def decode(content: bytes) -> list[Dialogue]:
  """Returns the dialogues of a shard, given all that `encode` returned."""
  with np.load(io.BytesIO(content), allow_pickle=False) as columns:
    tokens = np.split(columns['tokens'], np.cumsum(columns['length']))
    answers = np.split(columns['answers'], np.cumsum(columns['num_answers']))
    facts = [columns[x].tolist() for x in ('temperature', 'source', 'turn')]
  return [
    Dialogue(
      tokens=tokens[i],
      answers=tuple((start, end) for start, end in answers[i].tolist()),
      temperature=temperature,
      source=Source(source),
      turn=turn,
    )
    for i, (temperature, source, turn) in enumerate(zip(*facts, strict=True))
  ]
