"""The files of results in a folder tree, as a page shows them."""

import dataclasses
import pathlib
from typing import Any

from experiments.evaluation import generations
from experiments.reporting import result_file
from specsample import files

EVALUATION = 'result.json'
# What the other commands leave.
_OTHERS = (
  *('trees.json', 'benchmark.json', 'throughput.json', 'replay.json'),
  *('online.json', 'costs.json', 'predict.json', 'certificate.json'),
)


@dataclasses.dataclass(frozen=True)
class Run:
  """One file of results."""

  folder: str  # from the root of the tree
  file: str  # its name
  content: dict[str, Any]
  # By the folder of the setting, '' where there is one setting.
  texts: dict[str, list[generations.Prompt]]

  @property
  def name(self) -> str:
    """The folder and, where it is not an evaluation's, the file."""
    parts = [self.folder] if self.folder != '.' else []
    if self.file != EVALUATION or not parts:
      parts.append(self.file.removesuffix('.json'))
    return '/'.join(parts)


def find(root: str, prompts: int) -> list[Run]:
  """All files of results below a folder, by name.

  Args:
    root: the folder.
    prompts: how many texts of each category are read.

  Raises:
    ValueError: there are none, or one cannot be read; names it.
  """
  if files.is_remote(root):
    raise ValueError(
      f'--results={root} is in a bucket: copy the folder here first'
    )
  top = pathlib.Path(root)
  if not top.is_dir():
    raise ValueError(
      f'--results={root} is no folder: give that of --out, or one above it'
    )
  paths = sorted(
    path for name in (EVALUATION, *_OTHERS) for path in top.rglob(name)
  )
  if not paths:
    raise ValueError(
      f'--results={root} holds no {EVALUATION}, nor another file of results: '
      'run experiments.evaluate first'
    )
  return [_run(top, path, prompts) for path in paths]


def _run(top, path, prompts):
  texts = {}
  if path.name == EVALUATION:
    texts = {
      found.parent.name
      if found.parent != path.parent
      else '': generations.read(found, prompts)
      for found in _texts_of(path.parent)
    }
  return Run(
    folder=path.parent.relative_to(top).as_posix(),
    file=path.name,
    content=result_file.read(path),
    texts=texts,
  )


def _texts_of(folder):
  """Of a run: there, or in the folders of its settings."""
  here = folder / generations.NAME
  if here.exists():
    return [here]
  return sorted(
    found
    for found in folder.glob(f'*/{generations.NAME}')
    if not (found.parent / EVALUATION).exists()
  )
