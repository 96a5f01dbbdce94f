"""The source of a data set: a file of JSON lines, or the hub.

The hub is read with the library `datasets`, if that is installed.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import hashlib
import importlib
import json
import pathlib
import reprlib
from typing import Any

from experiments.command import config
from experiments.decoding import prompts as prompts_lib


@dataclasses.dataclass(frozen=True)
class Provenance:
  """A description of the data that was read."""

  source: str
  # The digest of the unpacked file, or of the hub's records as JSON lines.
  sha256: str
  published: bool | None  # whether it is the published file's; None if unknown
  left_out: int = 0  # records that lack a text


@dataclasses.dataclass(frozen=True)
class Subset:
  """A split of a data set, as the hub names it."""

  repository: str
  subset: str | None
  split: str
  revision: str | None = None  # a branch, tag or commit; None for the newest

  def rows(self) -> Iterable[dict[str, Any]]:
    """Returns the rows, downloaded or from the hub's cache."""
    try:
      # Imported by name: it is heavy, and neither tests nor checks need it.
      datasets = importlib.import_module('datasets')
    except ImportError as error:
      raise ValueError(
        f"{error}: pip install 'specsample[data]', or read a file"
      ) from error
    try:
      return datasets.load_dataset(
        self.repository, self.subset, split=self.split, revision=self.revision
      )
    # Errors of the network, the hub and its cache have no common base class.
    except Exception as error:
      raise ValueError(f'{type(error).__name__}: {error}') from error

  def __str__(self) -> str:
    """Returns the name that messages and results show."""
    parts = (self.repository, self.subset, self.split, self.revision)
    return 'hub: ' + ', '.join(part for part in parts if part is not None)


@dataclasses.dataclass(frozen=True)
class Record:
  """One line of a data set, or one row on the hub."""

  line: int  # from 1
  values: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """A data set whose records have texts of known names."""

  task: str  # its name in messages
  configurable: str  # whose `path` names a file of it
  fields: tuple[str, ...]  # the texts that each record has
  # A record without this text is left out; without another it is an error.
  skip_without: str | None = None
  # A record whose first turn begins with this text is left out.
  placeholder: str | None = None
  origin: str  # where to get it
  path: str | None
  shown: str | None = None  # how results name the file; None for its path
  hub: Subset | None = None  # read if no path is given
  sha256: str | None = None  # of the published file, unpacked

  def read(self) -> list[Record]:
    """Returns all records, except those that lack a text."""
    kept, _ = self._read()
    return kept

  def texts(self, record: Record) -> list[str]:
    """Returns a record's texts in the order of `fields`."""
    return [record.values[name].strip() for name in self.fields]

  def provenance(self) -> Provenance:
    """Describes the data that `read` reads."""
    kept, left_out = self._read()
    if self.path is not None:
      text = prompts_lib.unpacked(self._bytes())
      digest = hashlib.sha256(text).hexdigest()
      known = None if self.sha256 is None else digest == self.sha256
      return Provenance(self.shown or self.path, digest, known, left_out)
    found = hashlib.sha256()
    for record in kept:
      texts = record.values
      if self.fields:
        texts = {name: record.values[name] for name in self.fields}
      found.update(json.dumps(texts).encode() + b'\n')
    return Provenance(str(self.hub), found.hexdigest(), None, left_out)

  def error(self, reason: str) -> ValueError:
    """Returns an error with the data set's name, the reason and the remedy."""
    where = self.hub if self.path is None else self.path
    place = '' if where is None else f'{where}: '
    names = ', '.join(f'"{name}"' for name in self.fields)
    return ValueError(
      f'{self.task}: {place}{reason}: {self.origin}, and --gin_bindings='
      f"""'{self.configurable}.path = "FILE"' names a file of JSON lines"""
      f'{names and f" with {names}"}'
    )

  def _read(self) -> tuple[list[Record], int]:
    """Returns the records that are kept, and the number that are left out."""
    records = [
      Record(line, self._checked(line, values)) for line, values in self._rows()
    ]
    if not records:
      raise self.error('it has no records')
    needed = self.skip_without
    kept = [record for record in records if self._has_text(record.values)]
    if not kept:
      what = f'"{needed}"' if needed else 'text in place of its placeholder'
      raise self.error(f'none of {len(records)} records has a {what}')
    return kept, len(records) - len(kept)

  def _has_text(self, values) -> bool:
    if self.skip_without is not None:
      return bool(values[self.skip_without].strip())
    turns = values.get('turns')
    first = turns[0] if isinstance(turns, list) and turns else None
    return not (
      self.placeholder is not None
      and isinstance(first, str)
      and first.startswith(self.placeholder)
    )

  def _rows(self) -> Iterator[tuple[int, Any]]:
    if self.path is not None:
      yield from self._lines()
    elif self.hub is None:
      raise self.error('no file is given')
    else:
      try:
        yield from enumerate(self.hub.rows(), 1)
      except ValueError as error:
        raise self.error(str(error)) from error

  def _lines(self) -> Iterator[tuple[int, Any]]:
    data = self._bytes()
    try:
      lines = prompts_lib.lines(prompts_lib.text(data))
    except ValueError as error:
      raise self.error(str(error)) from error
    for number, line in lines:
      try:
        yield number, prompts_lib.value(line)
      except ValueError as error:
        raise self.error(f'line {number} is not JSON ({error})') from error

  def _bytes(self) -> bytes:
    try:
      return pathlib.Path(config.find(str(self.path))).read_bytes()
    except OSError as error:
      raise self.error(str(error.strerror)) from error

  def _checked(self, line: int, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
      raise self.error(f'line {line} is not a JSON object')
    for name in self.fields:
      text = values.get(name)
      may_be_empty = name == self.skip_without
      if not isinstance(text, str) or not (text.strip() or may_be_empty):
        raise self.error(
          f'line {line}: "{name}" is {reprlib.repr(text)}, but it should '
          'be a text'
        )
      if prompts_lib.is_broken(text):
        raise self.error(
          f'line {line}: "{name}" holds half of a surrogate pair'
        )
    return values
