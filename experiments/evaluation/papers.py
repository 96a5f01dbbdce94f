"""A paper's reported numbers beside the measured ones."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import numbers
import pathlib
import re
from typing import Any

import gin

from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import table as table_lib
from experiments.reporting import ratios as ratios_lib
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables as tables_lib

_POSITION = 'acceptance at '  # followed by a position, from 1
_OF_A_POSITION = re.compile(rf'{_POSITION}[1-9][0-9]*')
# The fields of a row that a paper's number can be compared with.
_COLUMNS = tuple(
  field.name
  for field in dataclasses.fields(rows_lib.Row)
  if field.type in (int, float, int | None, float | None)
)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
  """A table of a paper.

  An entry of `rows` has the setting, the method, and the paper's numbers by
  quantity: a field of `reporting.rows.Row` that is a number, 'acceptance at 1'
  and so on for a position, or a score of the setting's task. Settings and
  methods are those of the evaluation; others are shown without a number of
  ours, because they cannot be run here.

  An entry of `ratios` is a gain over another method. It also has that method's
  name, before the numbers, whose quantities are those of
  `reporting.ratios.RATIOS`: 1.083 tokens per round means 8.3% more.
  """

  source: str = ''  # paper, table, hardware and models
  note: str = ''  # why our numbers must differ
  rows: Sequence[tuple[str, str, Mapping[str, float]]] = ()
  ratios: Sequence[tuple[str, str, str, Mapping[str, float]]] = ()
  # The paper's names for our methods.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compared:
  """One number of a paper, and ours."""

  row: str  # setting and method; for a ratio, also the other method
  quantity: str
  paper: float | None  # None if ours stands in for a number without ours
  ours: float | None
  ci95: list[float] | None


def check(
  paper: Paper, evaluations: Mapping[str, evaluation_lib.Evaluation]
) -> None:
  """Refuses numbers that could not be shown beside ours.

  It is called before anything is decoded, with the evaluations by setting.
  """
  kinds: list[tuple[str, Sequence[Any], str]] = [
    ('rows', paper.rows, '(setting, method, numbers by quantity)'),
    ('ratios', paper.ratios, '(setting, method, other, numbers by quantity)'),
  ]
  for where, entries, form in kinds:
    for entry in entries:
      _check_row(where, entry, form)
      part, method, *over, values = entry
      evaluation = evaluations.get(part)
      if evaluation is None or method not in evaluation.methods:
        continue
      for name in over:
        _check_name(where, name, evaluation.methods, part)
      task = evaluation.task
      known = (*(task.score_names if task is not None else ()), *_COLUMNS)
      for quantity in values:
        if over:
          _check_name(where, quantity, ratios_lib.RATIOS, part)
        elif not _OF_A_POSITION.fullmatch(quantity):
          _check_name(where, quantity, known, part)


def _check_row(where: str, row: Sequence[Any], form: str) -> None:
  is_whole = len(row) == 1 + form.count(',') and isinstance(row[-1], Mapping)
  if not is_whole or not all(
    isinstance(value, numbers.Real) for value in row[-1].values()
  ):
    raise ValueError(f'Paper.{where} has {row!r}: give {form}')


def _check_name(
  where: str, name: str, known: Collection[str], part: str
) -> None:
  if name not in known:
    setting = f' for {part!r}' if part else ''
    raise ValueError(
      f'Paper.{where} has {name!r}{setting}: choose one of {", ".join(known)}'
      + (f', {_POSITION}1, ...' if where == 'rows' else '')
    )


def of_other_prompts(paper: Paper, benchmark: str) -> Paper:
  """Adds a note that our numbers are for other data than the settings name."""
  note = f'Ours are for {benchmark}, which --prompts put in place of that data.'
  return dataclasses.replace(paper, note=f'{note} {paper.note}'.strip())


def compare(paper: Paper, tables: Sequence[table_lib.Table]) -> list[Compared]:
  """Returns the paper's numbers beside ours, which are over all prompts."""
  generations = {table.part: table.generations for table in tables}
  measured = {
    (row.part, row.method): row
    for table in tables
    for row in table.rows
    if row.category == rows_lib.OVERALL
  }
  called = lambda method: paper.names.get(method, method)
  compared = []
  entries: list[Any] = [*paper.rows, *paper.ratios]
  for part, method, *over, values in entries:
    name = ', '.join(filter(None, (part, called(method))))
    if over:
      name += f' over {called(over[0])}'
    row, runs = measured.get((part, method)), generations.get(part, {})
    for quantity, value in values.items():
      if not over:
        ours = _ours(row, quantity)
      elif {method, *over} <= runs.keys():
        ours = ratios_lib.ratio(runs[method], runs[over[0]], quantity)
      else:
        ours = None, None
      compared.append(Compared(name, quantity, value, *ours))
      if row is not None and not over and ours[0] is None:
        compared += [
          Compared(name, other, None, *_ours(row, other))
          for other in _instead(row, quantity)
          if other not in values
        ]
  return compared


def to_json(paper: Paper, tables: Sequence[table_lib.Table]) -> dict[str, Any]:
  """Returns what result.json has of a paper: its numbers, and ours."""
  # The last parts of the targets' paths or hub names.
  paths = [pathlib.PurePath(table.evaluation.target.name) for table in tables]
  return {
    'source': paper.source,
    'note': paper.note,
    'targets': ', '.join(dict.fromkeys(path.name for path in paths)),
    'rows': [dataclasses.asdict(row) for row in compare(paper, tables)],
  }


def table(paper: Mapping[str, Any]) -> tables_lib.Table:
  """Returns a line per number of a paper, as `to_json` has it, and ours.

  A line without a number of the paper has ours for other numbers of samples.
  """
  targets = paper['targets']
  ours = f'ours, of {targets}' if targets else 'ours'
  known = tables_lib.columns(rows_lib.Row)
  title = lambda name: known[name].title if name in known else name
  lines = [
    [
      row['row'],
      title(row['quantity']),
      tables_lib.text(row['paper'], 'g'),
      tables_lib.text(row['ours'], '.3g'),
      tables_lib.interval(row['ci95'], '.3g'),
    ]
    for row in paper['rows']
  ]
  return tables_lib.Table(
    ['row', 'quantity', 'paper', ours, '95% interval'],
    lines,
    f'Beside the paper: {paper["source"]}',
    paper['note'],
  )


def _instead(row: rows_lib.Row, quantity: str) -> list[str]:
  """Returns our score of the most samples, if the paper's takes even more.

  For pass@100 this is pass@1 if each prompt was decoded once.
  """
  kind, _, _ = quantity.partition('@')
  found = [name for name in row.scores if name.startswith(f'{kind}@')]
  return sorted(found, key=lambda name: int(name.partition('@')[2]))[-1:]


def _ours(
  row: rows_lib.Row | None, quantity: str
) -> tuple[float | None, list[float] | None]:
  if row is None:
    return None, None
  if quantity in row.scores:
    score = row.scores[quantity]
    return score['value'], score['ci95']
  if quantity.startswith(_POSITION):
    position = int(quantity.removeprefix(_POSITION))
    shares = row.acceptance_by_position[position - 1 : position]
    return (shares[0] if shares else None), None
  interval = getattr(row, f'{quantity}_ci95', None)
  return getattr(row, quantity, None), interval
