"""Loads a model or a drafter as the library does, but for its weights.

What the loader would refuse, the report says, and nothing else can be wrong:
there is no second reading of any layout.
"""

from collections.abc import Iterator
import dataclasses
import os

from etils import epath

from experiments.inspection import facts as facts_lib
from specsample import files
from specsample.loading import card
from specsample.loading import drafter as drafter_lib
from specsample.loading import load
from specsample.loading.published import layouts
from specsample.loading.published import source as source_lib
from specsample.models import huggingface

_WEIGHTS = ('.safetensors', *huggingface.PICKLE_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of `inspect`.

  Attributes:
    path: the checkpoint's path.
    what: the kind of checkpoint.
    facts: lines, each a name and a value.
    problem: why it cannot be loaded; None if it can.
  """

  path: str
  what: str
  facts: facts_lib.Facts = ()
  problem: str | None = None

  def lines(self) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f'{self.path}: {self.what}'
    width = max((len(name) for name, _ in self.facts), default=0)
    for name, value in self.facts:
      yield f'  {name:{width}}  {value}'
    if self.problem is None:
      yield 'it can be loaded'
    else:
      yield f'PROBLEM {self.problem}'


def inspect(name_or_path: str, target: str | None = None) -> Report:
  """Reports what `specsample.load` or `specsample.load_drafter` would find.

  Args:
    name_or_path: as these functions take it. Nothing is downloaded: a name of
      the hub is looked up among earlier downloads.
    target: the model that a drafter is for; None for the target that its card
      names.
  """
  path = _find(name_or_path)
  if path.suffix in _WEIGHTS and not files.is_folder(path):
    path = path.parent
  facts, problem = facts_lib.of_files(path), None
  if target is None and _is_drafter(path):
    target = target_of(path)
  described = load.describe(_find(target)) if target is not None else None
  try:
    if described is None:
      facts += facts_lib.of_model(load.describe(path).model)
    else:
      found = drafter_lib.describe_drafter(path, described)
      facts += facts_lib.of_drafter(found)
  except ValueError as error:
    problem = ' '.join(str(error).split())
  what = 'a model' if target is None else f'a drafter for {target}'
  return Report(str(path), what, facts, problem)


def _is_drafter(path: epath.Path) -> bool:
  """Returns whether a folder holds a drafter, which also needs a target."""
  if not files.is_folder(path):
    return False
  if any((path / name).exists() for name in (card.NAME, drafter_lib.NAME)):
    return True
  try:
    opened = source_lib.open_folder(path)
    return opened is not None and layouts.find(*opened) is not None
  except ValueError:
    return False  # the loader of models says what is wrong


def target_of(path: epath.Path) -> str:
  """Returns the target that a drafter's card names."""
  named = None
  if (path / card.NAME).exists():
    named = card.read(path).get('target')
  if not isinstance(named, str):
    raise ValueError(
      f'{path} is a drafter, and does not say for which model: give '
      '--target=MODEL'
    )
  return named


def _find(name: str) -> epath.Path:
  shipped = card.shipped()
  if name in shipped:
    return files.at(shipped[name])
  path = load.find(name)
  if path is not None:
    return path
  if not load.is_hub_id(name):
    raise ValueError(f'{name!r} is neither a file nor a folder: check the path')
  # Imported here because it takes as long as the rest of the library.
  import huggingface_hub  # noqa: PLC0415
  from huggingface_hub import errors  # noqa: PLC0415

  try:
    return files.at(
      huggingface_hub.snapshot_download(name, local_files_only=True)
    )
  except (errors.HfHubHTTPError, OSError, ValueError) as error:
    raise ValueError(
      f'{name!r} is not a path, and was not downloaded from the hub to '
      f'{os.environ.get("HF_HOME", "its usual cache")}: check the path, or '
      f'run `hf download {name}` first'
    ) from error
