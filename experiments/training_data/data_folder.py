"""Dialogues to train on, as token ids, and the folders that hold them.

manifest.json says how a folder was made: it has the format, the target, the
settings, and an entry for each shard with the digest of its file. It is written
after each shard, and only the shards that it lists belong to the data.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import dataclasses
import enum
import hashlib
import io
import json
import os
import pathlib
from typing import Any

from etils import epath
import numpy as np

from experiments.command import distributed
from experiments.command import environment
from experiments.command import journal
from experiments.reporting import files as reporting_files
from experiments.training_data import chat
import specsample
from specsample import files
from specsample import settings

_FORMAT = 3
_MANIFEST = 'manifest.json'
_IDENTITY = ('format', 'target', 'vocab_size', 'settings')
# The values of the setting `answers`, and a description of each.
TARGET, OTHERS = 'target', 'others'
_WHAT = {
  None: 'answers of the target, sampled by make_data',
  TARGET: 'answers of the target, written by another engine',
  OTHERS: 'conversations whose answers the target did not write',
}
Manifest = dict[str, Any]  # JSON


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


def num_answer_tokens(dialogues: Iterable[Dialogue]) -> int:
  """Returns the total number of tokens in the answers."""
  return sum(end - start for x in dialogues for start, end in x.answers)


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


def shard_path(folder: pathlib.PurePath, number: int) -> epath.Path:
  """Returns the path of a shard."""
  return files.at(folder) / f'shard-{number:05}.npz'


@contextlib.contextmanager
def opened(
  folder: epath.Path, target: specsample.Loaded, settings: dict[str, Any]
) -> Iterator[Manifest]:
  """Keeps other runs out of a folder, and yields its manifest.

  The manifest of a new folder lists no shards. That of an old one lists those
  before the first file that is missing. Besides the target, the shards depend
  on the settings, which are JSON.
  """
  with _lock(folder):
    path = folder / _MANIFEST
    identity = {
      'format': _FORMAT,
      'target': target.fingerprint,
      'vocab_size': target.model.vocab_size,
      'settings': settings,
    }
    if path.exists():
      manifest = files.read_json(path)
      _check_same(path, manifest, json.loads(json.dumps(identity)))
    elif shard_path(folder, 0).exists():
      raise ValueError(
        f'{path} is missing, but its shards exist: give another --out'
      )
    else:
      manifest = identity | {'shards': []}
      _write(folder, manifest)
    shards = manifest['shards']
    exist = [shard_path(folder, i).exists() for i in range(len(shards))]
    whole = exist.index(False) if False in exist else len(exist)
    yield distributed.from_first(manifest | {'shards': shards[:whole]})


def add(
  folder: epath.Path,
  manifest: Manifest,
  dialogues: Sequence[Dialogue],
  notes: dict[str, Any],
) -> None:
  """Writes the next shard, then the manifest with an entry for it.

  `notes` is what else the entry says, as JSON.
  """
  shards = manifest['shards']
  content = encode(dialogues)
  path = shard_path(folder, len(shards))
  entry = {
    'dialogues': len(dialogues),
    'answer_tokens': num_answer_tokens(dialogues),
    'digest': _digest(content),
  }
  if distributed.is_first():
    if not files.is_remote(folder):
      for vectors in folder.glob(f'{path.stem}-*.npy'):
        vectors.unlink()  # of a shard that was there before
    reporting_files.write(path, content)
  shards.append(entry | notes)
  _write(folder, manifest)


def listed_tokens(manifest: Manifest) -> int:
  """Returns the number of answer tokens in the shards that are listed."""
  return sum(shard['answer_tokens'] for shard in manifest['shards'])


def _write(folder: epath.Path, manifest: Manifest) -> None:
  shards = manifest['shards']
  seconds = sum(shard['seconds'] for shard in shards)
  tokens = listed_tokens(manifest)
  manifest |= {
    'answer_tokens': tokens,
    'answer_tokens_per_second': tokens / seconds if seconds else None,
    **environment.describe(),
    'shards': shards,
  }
  if distributed.is_first():
    reporting_files.write_json(folder / _MANIFEST, manifest)


def read_shards(folder: epath.Path, manifest: Manifest) -> list[list[Dialogue]]:
  """Returns the dialogues of each shard that the manifest lists."""
  found = []
  for number, shard in enumerate(manifest['shards']):
    path = shard_path(folder, number)
    if not path.exists():
      raise ValueError(
        f'{path} is missing: run the same make_data command again to make it'
      )
    content = path.read_bytes()
    if _digest(content) != shard['digest']:
      raise ValueError(
        f'{path} is damaged, or not the shard that {_MANIFEST} lists: delete '
        'it, then run the same make_data command to make it again'
      )
    found.append(decode(content))
  return found


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
  """The dialogues of a folder."""

  folder: pathlib.PurePath
  manifest: Manifest
  shards: list[list[Dialogue]]

  def numbers(self, held_out_every: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of the training shards and of the held-out shards.

    Shards 0, n, 2 n, ... are held out, where n is `held_out_every`, so no shard
    changes sides as the data grow.
    """
    if not settings.is_count(held_out_every, 2):
      raise ValueError(
        f'held_out_every is {held_out_every}: give at least 2, so that some '
        'shards are held out and others are left to train on'
      )
    every = range(len(self.shards))
    held_out = every[::held_out_every]
    train = [i for i in every if i not in held_out]
    if not train:
      raise ValueError(
        f'{self.folder} has only one shard, which is held out: to get one to '
        'train on, run make_data again with more --tokens than the '
        f'{listed_tokens(self.manifest):,} that it has or, if a file holds '
        'no more, in another folder with a smaller '
        'Synthesis.prompts_per_shard'
      )
    return train, list(held_out)

  def digest(self) -> str:
    """Returns a hexadecimal digest of the dialogues."""
    digests = [shard['digest'] for shard in self.manifest['shards']]
    return _digest(' '.join(digests).encode())

  @property
  def what(self) -> str:
    """A phrase that says who wrote the answers."""
    return _WHAT[self.manifest['settings'].get('answers')]


def load(path: str | os.PathLike[str], target: specsample.Loaded) -> Data:
  """Reads data for a target; refuses data that were made for another one."""
  folder = files.at(path)
  manifest_path = folder / _MANIFEST
  if not manifest_path.exists():
    raise ValueError(
      f'{manifest_path} does not exist: make_data --out writes it'
    )
  manifest = files.read_json(manifest_path)
  if manifest.get('format') != _FORMAT:
    raise ValueError(
      f'{manifest_path} has format {manifest.get("format")}, but this version '
      f'reads format {_FORMAT}: make the data again'
    )
  if manifest['target'] != target.fingerprint:
    raise ValueError(
      f'{folder} was written by target {manifest["target"]}, but this target '
      f'is {target.fingerprint}: make data for this target'
    )
  settings = manifest['settings']
  if settings.get('template') != chat.Template.of(target.tokenizer).to_json():
    raise ValueError(
      f'{folder} was written with another tokenizer or chat template than this '
      "target's: make data for this target"
    )
  written = settings.get('weights')
  weights = None if target.exact_fingerprint is None else 'int8'
  if written != weights:
    raise ValueError(
      f'{folder} was written by a target with weights = {written!r}, but this '
      f'target is loaded with weights = {weights!r}: load it with '
      f'{written!r}, or make data for this target'
    )
  if not manifest['shards']:
    raise ValueError(
      f'{folder} has no shards yet: run the same make_data command again to '
      'continue'
    )
  return Data(folder, manifest, read_shards(folder, manifest))


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _check_same(path, manifest, identity) -> None:
  """Refuses the manifest of other data, naming what differs."""
  flat = lambda x: {**x, **(x.get('settings') or {}), 'settings': None}
  found = flat({name: manifest.get(name) for name in _IDENTITY})
  wanted = flat(identity)
  different = [
    name
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if different:
    raise ValueError(
      f'{path} belongs to data that differs in {", ".join(different)}: give '
      'another --out, or the settings that it was started with'
    )


@contextlib.contextmanager
def _lock(folder: epath.Path) -> Iterator[None]:
  """Refuses a second run in the folder; a bucket has no locks."""
  if files.is_remote(folder) or not distributed.is_first():
    yield
    return
  opened = os.open(folder, os.O_RDONLY)
  try:
    journal.lock(opened, folder)
    yield
  finally:
    os.close(opened)
