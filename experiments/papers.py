"""What a paper reports, beside what was measured."""

from collections.abc import Mapping, Sequence
import dataclasses

import gin

from experiments import evaluation as evaluation_lib
from experiments import results

_POSITION = 'acceptance at '  # and a position, from 1


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
  """A table of a paper.

  A row is the setting, the method, and the paper's numbers by quantity: a field
  of `results.Row`, 'acceptance at 1' and so on for a position, or a score.
  Settings and methods are those of the evaluation; others are shown without a
  number of ours, as what cannot be run here.

  Of a paper that gives gains, `over` is the method that all numbers are ratios
  to: 1.083 tokens a round are 8.3% more than its own.
  """

  source: str = ''  # paper, table, hardware and models
  note: str = ''  # why ours must differ
  rows: Sequence[tuple[str, str, Mapping[str, float]]] = ()
  over: str = ''  # of the same setting; '' where numbers are no ratios
  # What the paper calls our methods.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compared:
  """One number of a paper, and ours."""

  row: str  # setting and method, and the one that it is a ratio to
  quantity: str
  paper: float
  ours: float | None
  ci95: list[float] | None


def check(
  paper: Paper, evaluations: Mapping[str, evaluation_lib.Evaluation]
) -> None:
  """Refuses names that nothing will have, before anything is decoded.

  Args:
    paper: the table.
    evaluations: by setting.

  Raises:
    ValueError: names the quantity, or the method of `Paper.over`.
  """
  fields = {field.name for field in dataclasses.fields(results.Row)}
  for part, method, values in paper.rows:
    evaluation = evaluations.get(part)
    if evaluation is None or method not in evaluation.methods:
      continue
    if paper.over and paper.over not in evaluation.methods:
      where = f' of {part!r}' if part else ''
      raise ValueError(
        f'Paper.over is {paper.over!r}, which is no method{where}: choose one '
        f'of {", ".join(evaluation.methods)}'
      )
    for quantity in values:
      known = quantity in fields or quantity.startswith(_POSITION)
      if not known and evaluation.task is None:
        raise ValueError(
          f'Paper.rows has {quantity!r} of {part!r}, which is no field of a '
          'row, and no task scores there: correct the name'
        )


def compare(paper: Paper, rows: Sequence[results.Row]) -> list[Compared]:
  """The paper's numbers beside those of the rows over all prompts.

  A ratio of two rows has no interval: theirs do not say which prompts they
  share.
  """
  measured = {(row.part, row.method): row for row in rows}
  called = lambda method: paper.names.get(method, method)
  compared = []
  for part, method, values in paper.rows:
    row, base = measured.get((part, method)), measured.get((part, paper.over))
    name = ', '.join(filter(None, (part, called(method))))
    if paper.over:
      name += f' over {called(paper.over)}'
    for quantity, value in values.items():
      ours, interval = _ours(row, quantity)
      if paper.over:
        ours, interval = _ratio(ours, _ours(base, quantity)[0]), None
      compared.append(Compared(name, quantity, value, ours, interval))
  return compared


def _ratio(ours: float | None, base: float | None) -> float | None:
  return None if ours is None or not base else ours / base


def _ours(
  row: results.Row | None, quantity: str
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
