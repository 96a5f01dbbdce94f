"""Dialogues to train on, as token ids, and the files that hold them.

A shard is an .npz file, written completely or not at all. Its header names the
target and the settings; a shard with another target or other settings is
refused, and so is a damaged one.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import enum
import io
import json
import pathlib
from typing import Any
import zipfile
import zlib

from etils import epath
import numpy as np

from experiments.reporting import files

FORMAT = 2


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
  ended: bool  # the last answer was not cut, and includes its end
  turn: int  # `filters.digest` of the first user turn, 64 bits
  # [n, D] bfloat16, the target's final hidden vectors, 0 for the last token.
  # Only a dialogue that was just sampled has them; `features` stores them in a
  # file of their own.
  hidden: np.ndarray | None = None

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


def encode(header: dict[str, Any], dialogues: Sequence[Dialogue]) -> bytes:
  """Returns the content of a shard; equal arguments give equal bytes."""
  column = lambda name, dtype: np.asarray(
    [getattr(dialogue, name) for dialogue in dialogues], dtype
  )
  lengths = [dialogue.tokens.size for dialogue in dialogues]
  spans = [span for dialogue in dialogues for span in dialogue.answers]
  tokens = [dialogue.tokens for dialogue in dialogues]
  content = io.BytesIO()
  np.savez_compressed(
    content,
    header=np.frombuffer(json.dumps(header).encode(), np.uint8),
    tokens=np.concatenate([np.zeros(0, np.int32), *tokens]),
    length=np.asarray(lengths, np.int32),
    answers=np.asarray(spans, np.int32).reshape(-1, 2),
    num_answers=np.asarray([len(x.answers) for x in dialogues], np.int32),
    temperature=column('temperature', np.float32),
    source=column('source', np.int8),
    ended=column('ended', bool),
    turn=column('turn', np.uint64),
  )
  return content.getvalue()


def write(
  path: pathlib.PurePath,
  header: dict[str, Any],
  dialogues: Sequence[Dialogue],
) -> None:
  """Writes a shard, completely or not at all; see `files.write`."""
  files.write(path, encode(header, dialogues))


def read(
  path: epath.Path, header: dict[str, Any]
) -> tuple[list[Dialogue], dict[str, Any]]:
  """Returns the dialogues and the header of a shard.

  Args:
    path: the file.
    header: entries that the shard's header must have.
  """
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
      columns = {name: file[name] for name in file.files}
    found = json.loads(columns.pop('header').tobytes())
    if not isinstance(found, dict):
      raise ValueError('its header is not an object')
    different = [k for k in header if found.get(k) != header[k]]
    dialogues = [] if different else list(_rows(columns))
  except (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
  ) as error:
    raise ValueError(
      f'{path} is damaged ({error}): delete it, then run the same make_data '
      'command to make it again'
    ) from error
  if different:
    raise ValueError(
      f'{path} has another {" and ".join(different)}, so it does not belong '
      'here: move it away'
    )
  return dialogues, found


def _rows(columns: dict[str, np.ndarray]) -> Iterable[Dialogue]:
  tokens, lengths = columns['tokens'], columns['length']
  if lengths.sum() != tokens.size or lengths.min(initial=1) < 1:
    raise ValueError(
      f'it should have {lengths.sum()} tokens, but has {tokens.size}'
    )
  ends = np.cumsum(columns['num_answers'])
  if ends[-1:].sum() != len(columns['answers']):
    raise ValueError(
      f'it has {len(columns["answers"])} answers, but should have {ends[-1:]}'
    )
  rows = np.split(tokens, np.cumsum(lengths))[: lengths.size]
  answers = np.split(columns['answers'], ends)[: lengths.size]
  names = ('temperature', 'source', 'ended', 'turn')
  for row, spans, temperature, source, ended, turn in zip(
    rows, answers, *(columns[name].tolist() for name in names), strict=True
  ):
    bounds = [0, *spans.ravel().tolist()]
    if (
      not spans.size or bounds != sorted(set(bounds)) or bounds[-1] != row.size
    ):
      raise ValueError(f'it has answers at {bounds[1:]} in {row.size} tokens')
    yield Dialogue(
      row,
      tuple((start, end) for start, end in spans.tolist()),
      temperature,
      Source(source),
      ended,
      turn,
    )


def answer_tokens(dialogues: Iterable[Dialogue]) -> int:
  """Returns the total number of tokens in the answers."""
  return sum(dialogue.answer_tokens for dialogue in dialogues)
