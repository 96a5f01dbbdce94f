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
  """

  source: str = ''  # paper, table, hardware and models
  note: str = ''  # why ours must differ
  rows: Sequence[tuple[str, str, Mapping[str, float]]] = ()
  # What the paper calls our methods.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compared:
  """One number of a paper, and ours."""

  row: str  # setting and method
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
    ValueError: names the quantity.
  """
  fields = {field.name for field in dataclasses.fields(results.Row)}
  for part, method, values in paper.rows:
    evaluation = evaluations.get(part)
    if evaluation is None or method not in evaluation.methods:
      continue
    for quantity in values:
      known = quantity in fields or quantity.startswith(_POSITION)
      if not known and evaluation.task is None:
        raise ValueError(
          f'Paper.rows has {quantity!r} of {part!r}, which is no field of a '
          'row, and no task scores there: correct the name'
        )


def compare(paper: Paper, rows: Sequence[results.Row]) -> list[Compared]:
  """The paper's numbers beside those of the rows over all prompts."""
  measured = {(row.part, row.method): row for row in rows}
  compared = []
  for part, method, values in paper.rows:
    row = measured.get((part, method))
    name = ', '.join(filter(None, (part, paper.names.get(method, method))))
    for quantity, value in values.items():
      ours, interval = _ours(row, quantity) if row else (None, None)
      compared.append(Compared(name, quantity, value, ours, interval))
  return compared


def _ours(
  row: results.Row, quantity: str
) -> tuple[float | None, list[float] | None]:
  if quantity in row.scores:
    score = row.scores[quantity]
    return score['value'], score['ci95']
  if quantity.startswith(_POSITION):
    position = int(quantity.removeprefix(_POSITION))
    shares = row.acceptance_by_position[position - 1 : position]
    return (shares[0] if shares else None), None
  interval = getattr(row, f'{quantity}_ci95', None)
  return getattr(row, quantity, None), interval
