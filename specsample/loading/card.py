"""The cards of trained drafters, and where drafters are found.

card.json has the library's own entries, `OWN`, from which the drafter is made
again for its target, and any other facts about its training.
"""

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from etils import epath

from specsample import drafters
from specsample import files
from specsample.drafters import trainable
from specsample.loading import load
from specsample.models import checkpoint
from specsample.models import huggingface
from specsample.models import transformer

# The file that marks the folder of a drafter as complete.
NAME = 'card.json'
# Entries, with the types that JSON gives them.
OWN = {
  'format': int,
  'kind': str,
  'settings': dict,
  'fingerprint': str,  # of the target
  'sha256': str,  # of the file of weights
}
# The entries that say how many drafts are kept, in the order of preference:
# held-out text resembles the training text, people's questions do not.
MEASURED = ('on_questions', 'held_out')
_FORMAT = 1
# The drafters that can be saved, by the names that cards give them.
_KINDS: dict[str, Any] = {
  name.lower(): kind
  for name, kind in vars(drafters).items()
  if isinstance(kind, type) and issubclass(kind, trainable.Trainable)
}
# Files of a hub repository that hold a drafter, as `published` reads them or as
# the library writes them.
_FILE_PATTERNS = (
  NAME,
  'drafter.safetensors',
  'config.json',
  'generation_config.json',
  'model*.safetensors',
  'pytorch_model*.bin',
  '*_lm_head.safetensors',
  '*_lm_head.pt',
  '*.index.json',
  'mask_embedding.pt',
  'tokenizer*.json',
)
_NO_PICKLE = 'give a folder that save_drafter wrote'
# Where the drafters that the library ships are: in an installed package, or in
# the repository.
_LIBRARY = pathlib.Path(__file__).parents[1]
_SHELVES = (_LIBRARY / 'checkpoints', _LIBRARY.parent / 'checkpoints')


def find(name: str) -> epath.Path:
  """Finds the folder of a drafter: shipped, at a path, or on the hub."""
  folders = shipped()
  if name in folders:
    return files.at(folders[name])
  path = files.at(name).expanduser()
  if files.is_folder(path):
    return path
  huggingface.refuse_pickles(path, remedy=_NO_PICKLE)
  reason = ''
  if load.is_hub_id(name) and not path.exists():
    try:
      return files.at(load.download(name, _FILE_PATTERNS))
    except ValueError as error:
      reason = f' ({error})'
  raise ValueError(
    f'{name!r} is neither a folder nor a drafter that the library ships'
    f'{reason}: give the folder of a trained drafter, the name of a hub '
    f'repository, or one of {sorted(folders)}'
  )


def shipped(card: str = NAME) -> dict[str, pathlib.Path]:
  """Returns the folders that the library ships, by name.

  Args:
    card: the file that marks a folder; by default that of drafters.
  """
  return {
    path.parent.relative_to(shelf).as_posix(): path.parent
    for shelf in _SHELVES
    for path in shelf.glob(f'*/*/{card}')
  }


def make(
  drafter: trainable.Trainable, fingerprint: str, more: Mapping[str, Any]
) -> dict[str, Any]:
  """Makes the card of a drafter: the entries `OWN`, then those of `more`.

  `fingerprint` is the target's.
  """
  kinds = [kind for kind, cls in _KINDS.items() if type(drafter) is cls]
  if not kinds:
    raise ValueError(
      f'{drafter} is not a kind of drafter that can be saved: give one of '
      f'{list(_KINDS)}'
    )
  settings = {
    name: _to_json(value)
    for name, value in fields_of(drafter).items()
    if name != 'model'
  }
  own = {
    'format': _FORMAT,
    'kind': kinds[0],
    'settings': settings,
    'fingerprint': fingerprint,
  }
  return merged(own, more)


def merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the entries as JSON gives them back, those of the library first."""
  try:
    return json.loads(json.dumps({**own, **more, **own}, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'the card cannot be written as JSON ({error}): use only text, finite '
      'numbers, and lists and dicts of these'
    ) from error


def write(
  path: str | os.PathLike[str],
  content: Mapping[str, Any],
  name: str,
  save: Callable[[epath.Path], None],
  card: str = NAME,
) -> None:
  """Writes a folder whole or not at all: what `save` writes, then a card.

  `content`, with the hash of the file `name`, becomes the card. It comes last,
  because it marks the folder as complete.
  """
  with files.new_folder(path) as folder:

    def write_both():
      save(folder / name)
      own = {'sha256': sha256(folder / name)}
      files.write_json(folder / card, {**content, **own})

    files.on_first_process(write_both)


def sha256(path: epath.Path) -> str:
  """Returns the hash of a file that cards hold."""
  return hashlib.sha256(path.read_bytes()).hexdigest()


def fields_of(value: Any) -> dict[str, Any]:
  """Returns the fields of a dataclass, such as a drafter, by name."""
  return {x.name: vars(value)[x.name] for x in dataclasses.fields(value)}


def read(folder: epath.Path) -> dict[str, Any]:
  """Reads the card in a folder."""
  path = folder / NAME
  check_present(path)
  card = files.read_json(path)
  for name, kind in OWN.items():
    if type(card.get(name)) is not kind:
      raise ValueError(
        f'{path}: {name} is {card.get(name)!r}, expected {kind.__name__}: the '
        'file is damaged, so save the drafter again'
      )
  if card['format'] != _FORMAT:
    raise ValueError(
      f'{path} has format {card["format"]}, but this version of the library '
      f'reads format {_FORMAT}: install the version that wrote the file'
    )
  return card


def measured(card: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns how many of a drafter's drafts are kept, None if not measured.

  'acceptance_by_position' [K] holds the shares of rounds that keep draft 1, 2,
  ... 'acceptance_by_rank' [K, k] may be there, how often the draft of each rank
  is the one kept, as `tree.best` takes it, and 'tokens_by_nodes', the tokens
  per round with a lattice's best trees of '1', '3', ... nodes.
  """
  entries = (card.get(entry, {}) for entry in MEASURED)
  return next((x for x in entries if 'acceptance_by_position' in x), None)


def drafter_of(
  card: Mapping[str, Any], folder: epath.Path, target: load.Loaded
) -> trainable.Trainable:
  """Makes the drafter that a card describes, for its target."""
  fingerprint = target.fingerprint
  if card['fingerprint'] != fingerprint:
    name = f'{card.get("target", "the model")} ({card["fingerprint"]})'
    raise ValueError(
      f'the drafter in {folder} was trained for {name}, but this target is '
      f'{fingerprint}: load the target of the drafter, or train a drafter for '
      'this target'
    )
  settings = card['settings']
  try:
    settings = {
      name: _from_json(value, target.model.dtype)
      for name, value in settings.items()
    }
    return _KINDS[card['kind']](model=target.model, **settings)
  except (LookupError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f'{folder / NAME}: {card["kind"]} with settings {settings} does not '
      f'describe any of {list(_KINDS)} ({error}): save the drafter again'
    ) from error


def check_present(path: epath.Path) -> None:
  """Raises ValueError if a file of a drafter's folder is missing."""
  if path.exists():
    return
  others = sorted(path.parent.iterdir())
  huggingface.refuse_pickles(*others, remedy=_NO_PICKLE)
  raise ValueError(
    f'{path} is missing: give a folder that save_drafter finished writing'
  )


def _to_json(value):
  """Converts a setting to JSON; layers become a model's configuration."""
  if isinstance(value, transformer.Transformer):
    return checkpoint.to_json(value)
  return value


def _from_json(value, dtype):
  if isinstance(value, dict):
    return checkpoint.from_json(value, dtype)
  # JSON has no tuples, and a drafter must be hashable.
  return tuple(value) if isinstance(value, list) else value
