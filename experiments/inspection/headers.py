"""The headers of a folder's files, as far as they can be read."""

from collections.abc import Callable, Collection, Mapping
from concurrent import futures
import dataclasses
import functools
import math
import re

from etils import epath

from experiments.inspection import report
from specsample import files
from specsample.loading.published import source as source_lib
from specsample.models import config as config_lib
from specsample.models import huggingface
from specsample.models import safetensors_file

Tensors = Mapping[str, safetensors_file.Tensor]
_NUM_THREADS = 16


@dataclasses.dataclass(frozen=True)
class Headers:
  """The contents of a folder.

  Attributes:
    folder: the folder.
    config: config.json, empty if there is none.
    names: the weight files, whether they can be read or not.
    tensors: the tensors of the files that can be read.
    problems: what is damaged or missing.
  """

  folder: epath.Path
  config: config_lib.Config
  names: tuple[str, ...]
  tensors: Tensors
  problems: tuple[report.Problem, ...]

  @functools.cached_property
  def source(self) -> source_lib.Source:
    """The contents in the form that the loaders of published drafters take."""
    named = {
      name.removeprefix('model.'): tensor
      for name, tensor in self.tensors.items()
    }
    return source_lib.Source(self.folder, self.config, named)


def read(folder: epath.Path) -> Headers:
  """Reads all headers that it can, and records the problems of the others."""
  problems: list[report.Problem] = []
  guarded = functools.partial(_guarded, problems)
  path = folder / 'config.json'
  config = guarded(lambda: files.read_json(path)) if path.exists() else None
  names = guarded(lambda: source_lib.weight_files(folder)) or []
  present = {path.name for path in folder.iterdir()}
  absent = tuple(name for name in names if name not in present)
  if absent:
    problems.append(
      report.Problem(
        f'{report.count(len(absent), "file")} missing that the '
        'index names: download what is missing',
        absent,
      )
    )
  there = [folder / name for name in names if name in present]
  found: dict[str, safetensors_file.Tensor] = {}
  with futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    read_header = lambda path: guarded(lambda: source_lib.read_header(path))
    for header in pool.map(read_header, there):
      found |= header or {}
  if not names:
    problems.extend(_without_weights(folder))
  return Headers(
    folder=folder,
    config=config_lib.Config(config or {}, str(path)),
    names=tuple(names),
    tensors=found,
    problems=tuple(problems),
  )


def unsupported(
  tensors: Tensors, supported: Collection[str]
) -> list[report.Problem]:
  """Returns a problem for each dtype that is not supported."""
  by_kind: dict[str, list[str]] = {}
  for name, tensor in tensors.items():
    if tensor.kind not in supported:
      by_kind.setdefault(tensor.kind, []).append(name)
  return [
    report.Problem(
      f'{report.count(len(names), "tensor")} stored as {kind}, but the '
      f'supported types are {", ".join(supported)}: load a version that is '
      'not quantised',
      tuple(sorted(names)),
    )
    for kind, names in by_kind.items()
  ]


def facts(tensors: Tensors) -> list[tuple[str, str]]:
  """Returns how many numbers are stored, and their bytes by dtype.

  Numbers that have several names are counted once.
  """
  unique = {(x.path, x.offset, x.shape): x for x in tensors.values()}.values()
  by_kind = ((x.kind, math.prod(x.shape) * _bits(x.kind) // 8) for x in unique)
  num_stored = sum(math.prod(tensor.shape) for tensor in unique)
  return [
    ('stored', f'{num_stored:,} numbers in {len(tensors):,} tensors'),
    ('bytes', report.tally(by_kind)),
  ]


def _bits(kind: str) -> int:
  """Returns the bits of a dtype of the format: 8 for F8_E4M3, and for BOOL."""
  match = re.search(r'\d+', kind)
  return int(match[0]) if match else 8


def _guarded(problems, read: Callable):
  """Calls `read`; turns an error into a problem and returns None."""
  try:
    return read()
  except (ValueError, OSError) as error:
    problems.append(report.of_error(error))
  return None


def _without_weights(folder):
  others = tuple(
    path.name
    for path in sorted(folder.iterdir())
    if path.suffix in huggingface.PICKLE_SUFFIXES
  )
  if others:
    text = 'no weight file of a known kind, only files that may be pickles'
    return [report.Problem(text, others)]
  return [report.Problem('no weight files: download them')]
