"""A folder of shards with a manifest; the same command can extend it.

manifest.json says what the shards hold: the target's fingerprint, the settings,
and how each shard was made. A shard belongs to the data set once its file
exists; the manifest is updated after that.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from typing import Any

from experiments.command import distributed
from experiments.command import environment
from experiments.reporting import files as reporting_files
from experiments.training_data import dialogues as dialogues_lib
from experiments.training_data import template as template_lib
from experiments.training_data.dialogues import Dialogue
import specsample
from specsample import checks
from specsample import files

_MANIFEST = 'manifest.json'
# The values of the setting `answers`, and a description of each.
TARGET, OTHERS = 'target', 'others'
_WHAT = {
  None: 'answers of the target, sampled by make_data',
  TARGET: 'answers of the target, written by another engine',
  OTHERS: 'conversations whose answers the target did not write',
}


@dataclasses.dataclass(frozen=True)
class Identity:
  """The properties that all shards of a folder share."""

  target: str  # the fingerprint of its parameters
  vocab_size: int
  settings: dict[str, Any]  # JSON

  def header(self, number: int) -> dict[str, Any]:
    """Returns the entries that the header of shard `number` must have."""
    settings = json.dumps(self.settings, sort_keys=True)
    return {
      'format': dialogues_lib.FORMAT,
      'target': self.target,
      'settings': hashlib.sha256(settings.encode()).hexdigest(),
      'number': number,
    }

  def to_json(self) -> dict[str, Any]:
    """Returns the manifest's entries for these properties, as JSON."""
    return {'format': dialogues_lib.FORMAT, **dataclasses.asdict(self)}


def shard_path(folder: pathlib.PurePath, number: int):
  """Returns the path of a shard."""
  return files.at(folder) / f'shard-{number:05}.npz'


class Folder:
  """A folder in which one run at a time makes shards."""

  def __init__(
    self,
    folder: pathlib.PurePath,
    identity: Identity,
    notes: dict[str, Any] | None = None,
  ):
    """Opens a folder or begins a new one.

    Args:
      folder: its path, local or in a bucket.
      identity: the properties that its shards share.
      notes: further entries of the manifest, as JSON.
    """
    self._folder = files.at(folder)
    self._identity = identity
    self._notes = notes or {}
    self._lock = _lock(self._folder) if distributed.is_first() else None
    self._shards: dict[int, dict[str, Any]] = {}
    path = self._folder / _MANIFEST
    if path.exists():
      manifest = files.read_json(path)
      _check_same(path, manifest, identity)
      self._shards = dict(enumerate(manifest['shards']))
    else:
      if shard_path(folder, 0).exists():
        raise ValueError(
          f'{path} is missing, but its shards exist: give another --out'
        )
      self._update()

  def read(
    self, number: int
  ) -> tuple[list[Dialogue], dict[str, Any] | None] | None:
    """Returns a shard's dialogues and its origin, or None without one."""
    path = shard_path(self._folder, number)
    if not path.exists():
      return None
    found, header = dialogues_lib.read(path, self._identity.header(number))
    origin = header.get('origin')
    if number not in self._shards:  # the run ended before it was noted
      self._note(number, found, {'origin': origin} if origin else {})
    return found, origin

  def add(
    self,
    number: int,
    found: list[Dialogue],
    notes: dict[str, Any],
    origin: dict[str, Any] | None = None,
  ) -> None:
    """Writes a shard; returns once it is on the disk.

    Args:
      number: the shard's number.
      found: its dialogues.
      notes: its entries in the manifest, as JSON.
      origin: the conversations of a file that it was made from, as JSON.
    """
    header = self._identity.header(number)
    if origin:
      header['origin'] = origin
      notes = notes | {'origin': origin}
    if distributed.is_first():
      dialogues_lib.write(shard_path(self._folder, number), header, found)
    self._note(number, found, notes)

  def close(self) -> None:
    """Releases the folder for another run."""
    if self._lock is not None:
      os.close(self._lock)

  def _note(self, number, found, notes) -> None:
    self._shards[number] = {
      'dialogues': len(found),
      'answer_tokens': dialogues_lib.answer_tokens(found),
      **notes,
    }
    self._update()

  def _update(self) -> None:
    if not distributed.is_first():
      return
    shards = [self._shards[i] for i in sorted(self._shards)]
    timed = [shard for shard in shards if 'seconds' in shard]
    tokens = lambda shards: sum(shard['answer_tokens'] for shard in shards)
    seconds = sum(shard['seconds'] for shard in timed)
    content = {
      **self._identity.to_json(),
      'answer_tokens': tokens(shards),
      'answer_tokens_per_second': tokens(timed) / seconds if seconds else None,
      **self._notes,
      **environment.describe(),
      'shards': shards,
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    reporting_files.write(self._folder / _MANIFEST, f'{text}\n'.encode())


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
  """All dialogues of a folder."""

  folder: pathlib.PurePath
  identity: Identity
  shards: list[list[Dialogue]]
  manifest: dict[str, Any]  # how the shards were made

  def numbers(self, held_out_every: int) -> tuple[list[int], list[int]]:
    """Returns the numbers of the training shards and of the held-out shards.

    Shards 0, n, 2 n, ... are held out, where n is `held_out_every`, so no shard
    changes sides as the data grow.
    """
    if not checks.is_count(held_out_every, 2):
      raise ValueError(
        f'held_out_every is {held_out_every}: give at least 2, so that some '
        'shards are held out and others are left to train on'
      )
    every = range(len(self.shards))
    held_out = every[::held_out_every]
    return [i for i in every if i not in held_out], list(held_out)

  def to_train(
    self, held_out_every: int, num_tokens: int | None = None
  ) -> list[int]:
    """Returns the numbers of the first shards with enough tokens to train on.

    Args:
      held_out_every: as in `numbers`.
      num_tokens: the number of answer tokens needed; None for all shards.
    """
    train, _ = self.numbers(held_out_every)
    if not train:
      remedy = (
        'run make_data again with more --tokens than the '
        f'{self.manifest["answer_tokens"]:,} that it has'
      )
      if 'file' in self.manifest:
        remedy += (
          ' or, if its file holds no more, make it in another folder with a '
          'smaller Synthesis.prompts_per_shard'
        )
      raise ValueError(
        f'{self.folder} has only one shard, which is held out: to get one to '
        f'train on, {remedy}'
      )
    if num_tokens is None:
      return train
    kept, count = self._until(train, num_tokens, dialogues_lib.answer_tokens)
    if count < num_tokens:
      raise ValueError(
        f'{num_tokens:,} tokens were asked for, but the data has only '
        f'{count:,} to train on: make more data, or train on fewer tokens'
      )
    return kept

  def to_hold_out(self, held_out_every: int, num_answers: int) -> list[int]:
    """Returns the numbers of the first held-out shards with enough answers.

    They hold `num_answers` greedy dialogues, or all greedy dialogues that are
    held out if there are fewer.
    """
    _, held_out = self.numbers(held_out_every)
    num_greedy = lambda shard: sum(d.temperature == 0 for d in shard)
    return self._until(held_out, num_answers, num_greedy)[0]

  def only(self, numbers: Iterable[int]) -> 'Data':
    """Returns the same data with all other shards empty."""
    kept = set(numbers)
    shards = [x if i in kept else [] for i, x in enumerate(self.shards)]
    return dataclasses.replace(self, shards=shards)

  def _until(self, numbers, limit, count):
    """Returns the first shards that reach `limit`, and their total count."""
    kept, total = [], 0
    for number in numbers:
      found = count(self.shards[number])
      if found and total < limit:
        kept.append(number)
        total += found
    return kept, total

  @property
  def what(self) -> str:
    """A phrase that says who wrote the answers."""
    return _WHAT[self.identity.settings.get('answers')]

  def digest(self) -> str:
    """Returns a hexadecimal digest of the dialogues."""
    found = hashlib.sha256()
    for shard in self.shards:
      found.update(digest(shard).encode())
    return found.hexdigest()[:16]


def digest(shard: Sequence[Dialogue]) -> str:
  """Returns a hexadecimal digest of the dialogues; '' if there are none."""
  found = hashlib.sha256()
  for dialogue in shard:
    found.update(f'{dialogue.answers} {dialogue.temperature}\n'.encode())
    found.update(dialogue.tokens.tobytes())
  return found.hexdigest()[:16] if shard else ''


def load(
  path: str | os.PathLike[str],
  target: str,
  template: template_lib.Template,
  weights: str | None = None,
) -> Data:
  """Reads data that a target wrote.

  Args:
    path: the folder.
    target: the fingerprint of the target's parameters.
    template: the chat template of its tokenizer.
    weights: how its parameters were loaded, as in `specsample.load`.
  """
  folder = files.at(path)
  manifest_path = folder / _MANIFEST
  if not manifest_path.exists():
    raise ValueError(
      f'{manifest_path} does not exist: make_data --out writes it'
    )
  manifest = files.read_json(manifest_path)
  try:
    identity = Identity(
      *(manifest[name] for name in ('target', 'vocab_size', 'settings'))
    )
    numbers = range(len(manifest['shards']))
  except (KeyError, TypeError) as error:
    raise ValueError(
      f'{manifest_path} is not a manifest of make_data ({error}): give a '
      'folder that make_data wrote'
    ) from error
  if manifest.get('format') != dialogues_lib.FORMAT:
    raise ValueError(
      f'{manifest_path} has format {manifest.get("format")}, but this version '
      f'reads format {dialogues_lib.FORMAT}: make the data again'
    )
  if identity.target != target:
    raise ValueError(
      f'{folder} was written by target {identity.target}, but this target is '
      f'{target}: make data for this target'
    )
  if identity.settings.get('template') != _as_json(template):
    raise ValueError(
      f'{folder} was written with another tokenizer or chat template than this '
      "target's: make data for this target"
    )
  written = identity.settings.get('weights')
  if written != weights:
    raise ValueError(
      f'{folder} was written by a target with weights = {written!r}, but this '
      f'target is loaded with weights = {weights!r}: load it with '
      f'{written!r}, or make data for this target'
    )
  shards = []
  for number in numbers:
    shard = shard_path(folder, number)
    if not shard.exists():
      raise ValueError(
        f'{shard} is missing: run the same make_data command again to make it'
      )
    found, _ = dialogues_lib.read(shard, identity.header(number))
    for dialogue in found:
      if (
        not 0
        <= dialogue.tokens.min()
        <= dialogue.tokens.max()
        < (identity.vocab_size)
      ):
        raise ValueError(
          f'{shard} has token ids that this target does not have: make data '
          'for this target'
        )
    shards.append(found)
  if not shards:
    raise ValueError(
      f'{folder} has no shards yet: run the same make_data command again to '
      'continue'
    )
  return Data(folder, identity, shards, manifest)


def load_for(path: str | os.PathLike[str], target: specsample.Loaded) -> Data:
  """Reads data that this target wrote; see `load`."""
  return load(
    path,
    target.fingerprint,
    template_lib.Template.of(target.tokenizer),
    None if target.exact_fingerprint is None else 'int8',
  )


def _as_json(template):
  return json.loads(json.dumps(dataclasses.asdict(template)))


def _check_same(path, manifest, identity) -> None:
  expected = json.loads(json.dumps(identity.to_json()))
  flat = lambda content: {
    **{name: content.get(name) for name in expected if name != 'settings'},
    **(content.get('settings') or {}),
  }
  found, wanted = flat(manifest), flat(expected)
  different = [
    name
    for name in sorted(found.keys() | wanted.keys())
    if found.get(name) != wanted.get(name)
  ]
  if different or not isinstance(manifest.get('shards'), list):
    names = ', '.join(different) or 'kind'
    raise ValueError(
      f'{path} belongs to data that differs in {names}: give another --out, '
      'or the settings that it was started with'
    )


def _lock(folder) -> int | None:
  if files.is_remote(folder):
    return None
  lock = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    os.close(lock)
    raise ValueError(
      f'{folder} is in use by another run: wait for it, or give another --out'
    ) from error
  return lock
