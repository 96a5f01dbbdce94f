"""The result files in a folder tree, as a page shows them."""

import dataclasses
import pathlib
import types
import typing
from typing import Any

from experiments.evaluation import generations
from experiments.reporting import result_file
from experiments.reporting import rows as rows_lib
from specsample import files

EVALUATION = 'result.json'
GENERATION = 'generate.json'
# The result files of the other commands.
_OTHERS = (
  GENERATION,
  *('benchmark.json', 'certificate.json'),
)

# The types of a row's fields.
_HINTS = typing.get_type_hints(rows_lib.Row)
# The fields of a paper, and of its rows; see `evaluation.papers`.
_PAPER = {'source', 'note', 'targets', 'rows'}
_PAPER_ROW = {'row', 'quantity', 'paper', 'ours', 'ci95'}
# The fields of every result file that say where it was measured.
_DESCRIPTION = ('hardware', 'versions', 'git_commit', 'command')


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
    content=read(path),
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


def read(path: pathlib.PurePath) -> dict[str, Any]:
  """Returns a result file's content.

  The rows of a result.json have the fields of `rows.Row`. In other files, only
  the schema is checked.

  Raises:
    ValueError: if the file is missing, damaged, or of a schema that this
      version does not read; it names the file, the schema and the remedy.
  """
  content = result_file.load(path)
  schema = content.get('schema')
  if type(schema) is not int or schema != result_file.SCHEMA:
    raise ValueError(
      f'{path} has schema {schema!r}, but this version reads schema '
      f'{result_file.SCHEMA}: make it again, or move it away'
    )
  if path.name == 'result.json':
    _check_result(path, content)
  return content


def _check_result(path, content):
  _check(path, content, _DESCRIPTION)
  rows = content.get('rows')
  if not isinstance(rows, list) or not rows:
    raise _refusal(path, 'no rows')
  if not all(isinstance(row, dict) for row in rows):
    raise _refusal(path, 'rows that are not objects')
  for row in rows:
    _check(path, row, _HINTS)
    if unknown := sorted(row.keys() - _HINTS.keys()):
      raise _refusal(path, f'unknown fields {", ".join(unknown)}')
    _check_types(path, row)
  known = [rows_lib.Row(**row) for row in rows]
  in_all = {row.setting for row in rows_lib.overall(known)}
  if {row.setting for row in known} - in_all:
    raise _refusal(path, 'no row over all prompts')
  _check_paper(path, content.get('paper'))


def _check_types(path, row):
  """Checks the types of a row's fields, but not of the items of a list."""
  for name, hint in _HINTS.items():
    union = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    kinds = [typing.get_origin(one) or one for one in union or (hint,)]
    # In JSON, a float may be written as a whole number.
    kinds += [int] * (float in kinds)
    if not isinstance(row[name], tuple(kinds)):
      raise _refusal(path, f'a {name} that is {row[name]!r}')


def _check_paper(path, paper):
  if paper is None:
    return
  is_whole = isinstance(paper, dict) and paper.keys() >= _PAPER
  rows = paper['rows'] if is_whole else None
  if not isinstance(rows, list) or not all(
    isinstance(row, dict) and row.keys() >= _PAPER_ROW for row in rows
  ):
    raise _refusal(path, "a paper's numbers in another form")


def _check(path, found, names):
  missing = [name for name in names if name not in found]
  if missing:
    raise _refusal(path, f'no {", ".join(missing)}')


def _refusal(path, why):
  return ValueError(
    f'{path} has schema {result_file.SCHEMA} and {why}, which cannot be '
    'reconstructed: evaluate again into another --out, or move the file away'
  )
