"""Dialogues to learn from, as token ids: a file of them, written whole or not.

A shard is an .npz file. Its header says which target wrote it and under which
settings; a shard of another one is refused, as is one that is cut off.
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

from experiments import results

FORMAT = 1


class Source(enum.IntEnum):
  """Where the user's turn is from."""

  SAMPLED = 0  # all of it by the target
  OPENED = 1  # by the target, after given first words
  PROMPT = 2  # from a file


@dataclasses.dataclass(frozen=True, eq=False)
class Dialogue:
  """A user's turn and the target's own answer."""

  tokens: np.ndarray  # [n] int32, chat template and all
  answer: int  # the index at which the answer begins
  temperature: float  # of the answer; 0 is greedy
  source: Source
  ended: bool  # the answer has its end, and was not cut
  turn: int  # 64 bits of the user's words, `filters.digest`
  # [n, D] bfloat16, the target's last hidden vectors, the last of them 0. Of a
  # dialogue that has just been made; in files of their own (`features`).
  hidden: np.ndarray | None = None


def encode(header: dict[str, Any], dialogues: Sequence[Dialogue]) -> bytes:
  """The content of a shard; equal for equal arguments."""
  column = lambda name, dtype: np.asarray(
    [getattr(dialogue, name) for dialogue in dialogues], dtype
  )
  lengths = [dialogue.tokens.size for dialogue in dialogues]
  content = io.BytesIO()
  np.savez_compressed(
    content,
    header=np.frombuffer(json.dumps(header).encode(), np.uint8),
    tokens=np.concatenate([dialogue.tokens for dialogue in dialogues]),
    length=np.asarray(lengths, np.int32),
    answer=column('answer', np.int32),
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
  """Writes a shard, as `results.write`."""
  results.write(path, encode(header, dialogues))


def read(path: epath.Path, header: dict[str, Any]) -> list[Dialogue]:
  """Reads a shard whose header has to be `header`.

  Raises:
    ValueError: it is damaged, or of another target, settings or place.
  """
  try:
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
      columns = {name: file[name] for name in file.files}
    found = json.loads(columns.pop('header').tobytes())
    if not isinstance(found, dict):
      raise ValueError('its header is no object')
    dialogues = list(_rows(columns)) if found == header else []
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
      f'{path} is damaged ({error}): delete it, and the same make_data command '
      'makes it anew'
    ) from error
  if found != header:
    names = [k for k in header if found.get(k) != header[k]]
    raise ValueError(
      f'{path} is of another {" and ".join(names)}: it does not belong here, '
      'move it away'
    )
  return dialogues


def _rows(columns: dict[str, np.ndarray]) -> Iterable[Dialogue]:
  tokens, lengths = columns['tokens'], columns['length']
  if lengths.sum() != tokens.size or lengths.min(initial=1) < 1:
    raise ValueError(f'{lengths.sum()} tokens expected, {tokens.size} there')
  rows = np.split(tokens, np.cumsum(lengths)[:-1])
  names = ('answer', 'temperature', 'source', 'ended', 'turn')
  for row, answer, temperature, source, ended, turn in zip(
    rows, *(columns[name].tolist() for name in names), strict=True
  ):
    if not 0 < answer < row.size:
      raise ValueError(f'an answer at {answer} of {row.size} tokens')
    yield Dialogue(row, answer, temperature, Source(source), ended, turn)


def answer_tokens(dialogues: Iterable[Dialogue]) -> int:
  """How many tokens there are to learn."""
  return sum(dialogue.tokens.size - dialogue.answer for dialogue in dialogues)
