"""Finds the model or drafter at a path and its layout, and reports on it.

Only headers are read, so that damaged parts can be told from intact ones.
"""

import os

from etils import epath

from experiments.inspection import drafters
from experiments.inspection import headers as headers_lib
from experiments.inspection import models
from experiments.inspection import report
from specsample import files
from specsample.loading import card
from specsample.loading import drafter
from specsample.loading import load
from specsample.loading.published import layouts
from specsample.loading.published import source as source_lib
from specsample.models import checkpoint
from specsample.models import huggingface
from specsample.models import transformer

_WEIGHTS = ('.safetensors', *huggingface.PICKLE_SUFFIXES)


def inspect(name_or_path: str, target: str | None = None) -> report.Report:
  """Reports what `specsample.load` or `specsample.load_drafter` would find.

  Args:
    name_or_path: as these functions take it. Nothing is downloaded: a name of
      the hub is looked up among earlier downloads.
    target: the model that a drafter is for. None means the target that the
      drafter's card names if it is on this machine, and otherwise no target.

  Raises:
    ValueError: there is nothing, or no checkpoint, at the path; or `target`
      does not describe a model.
  """
  path = _find(name_or_path)
  model = None if target is None else models.model_at(_find(target))
  if not files.is_folder(path):
    if path.suffix == '.gguf':
      return models.of_gguf(path)
    if path.suffix not in _WEIGHTS:
      raise ValueError(
        f'{path} is not a weight file: give a .gguf file, or the folder that '
        'holds config.json and the weights'
      )
    return _of_file(path, model)
  return _of_folder(path, model)


def _of_folder(folder, target):
  if (folder / checkpoint.CONFIG_NAME).exists():
    return models.of_saved(folder)
  own = card.NAME, drafter.NAME
  if any((folder / name).exists() for name in own):
    return drafters.saved(folder, target or _of_card(folder))
  headers = headers_lib.read(folder)
  has_config = (folder / 'config.json').exists()
  if not headers.names and not has_config:
    others = [x.name for x in folder.iterdir() if x.suffix in _WEIGHTS]
    raise ValueError(
      f'{folder} has no checkpoint'
      + (f', but it has {", ".join(sorted(others))}' if others else '')
      + ': give a folder with config.json and weights, one that this library '
      'saved, or the name of a .gguf file itself'
    )
  try:
    layout = layouts.find(headers.source)
  except ValueError as error:
    return _of_no_layout(headers, report.of_error(error))
  if layout is not None:
    return drafters.published(headers, layout, target)
  if has_config:
    return models.of_folder(headers)
  return _of_no_layout(
    headers,
    report.Problem(
      'no config.json, which a model has, and no known layout of a drafter: '
      f'the known layouts are {", ".join(x.name for x in layouts.ALL)}'
    ),
  )


def _of_no_layout(headers, problem):
  return report.Report(
    path=str(headers.folder),
    what='weights in an unknown layout',
    facts=tuple(headers_lib.facts(headers.tensors)),
    problems=(*headers.problems, problem),
  )


def _of_file(path, target):
  """Reports on the folder if it uses this file, otherwise on the file alone."""
  try:
    names = source_lib.weight_files(path.parent)
  except ValueError:
    names = [path.name]  # the index is damaged
  if path.name in (*names, drafter.NAME):
    return _of_folder(path.parent, target)
  problem = report.Problem(
    'a file of this name holds neither a model nor a drafter: rename it, or '
    'convert it'
  )
  try:
    facts = headers_lib.facts(source_lib.read_header(path))
  except ValueError as error:
    facts = []
    problem = report.of_error(error)
  return report.Report(str(path), 'a file of tensors', tuple(facts), (problem,))


def _of_card(folder) -> transformer.Transformer | None:
  """Returns the target that a card names, if it is on this machine."""
  try:
    name = card.read(folder).get('target')
    if isinstance(name, str):
      return models.model_at(_find(name))
  except ValueError:
    pass
  return None


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
