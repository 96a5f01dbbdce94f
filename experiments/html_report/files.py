"""The result files in a folder tree, as a page shows them."""

import dataclasses
import pathlib
from typing import Any

from experiments.evaluation import generations
from experiments.reporting import result_file
from specsample import files

EVALUATION = 'result.json'
GENERATION = 'generate.json'
# The result files of the other commands.
_OTHERS = (
  GENERATION,
  *('benchmark.json', 'throughput.json'),
  *('online.json', 'costs.json', 'certificate.json'),
  'vocabularies.json',
)


@dataclasses.dataclass(frozen=True)
class Run:
  """One result file."""

  folder: str  # relative to the root of the tree
  file: str  # its name
  content: dict[str, Any]
  # By the folder of the setting; '' if there is one setting.
  texts: dict[str, list[generations.Prompt]]

  @property
  def name(self) -> str:
    """The folder and, unless it is an evaluation's, the file."""
    parts = [self.folder] if self.folder != '.' else []
    if self.file != EVALUATION or not parts:
      parts.append(self.file.removesuffix('.json'))
    return '/'.join(parts)


def find(root: str, prompts: int) -> list[Run]:
  """Finds all result files below a folder, sorted by path.

  Args:
    root: the folder.
    prompts: how many prompts of each category to read.

  Raises:
    ValueError: there are none, or one cannot be read; the message names it.
  """
  if files.is_remote(root):
    raise ValueError(
      f'--results={root} is in a bucket: copy the folder here first'
    )
  top = pathlib.Path(root)
  if not top.is_dir():
    raise ValueError(
      f'--results={root} is not a folder: give the folder of --out, or one '
      'above it'
    )
  paths = sorted(
    path for name in (EVALUATION, *_OTHERS) for path in top.rglob(name)
  )
  if not paths:
    raise ValueError(
      f'--results={root} has neither {EVALUATION} nor another result file: '
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
  """Returns the generations.jsonl files of a run, or of its settings."""
  here = folder / generations.NAME
  if here.exists():
    return [here]
  return sorted(
    found
    for found in folder.glob(f'*/{generations.NAME}')
    if not (found.parent / EVALUATION).exists()
  )
