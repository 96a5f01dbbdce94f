"""How well methods draft in a run and in its parts, if some of them learn."""

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from experiments import methods as methods_lib
from experiments.reporting import columns
from experiments.reporting import ratios
from experiments.reporting import rows as rows_lib

# Equal parts of a run that have a row each; fewer if there are fewer batches.
_PARTS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """A method over some batches in the order of decoding.

  A method that learns has a twin, the first method with the same drafter and
  rule that does not learn; the other methods have none.
  """

  method: str = columns.shown('method', 'as the configuration calls it')
  batches: str = columns.shown('batches', 'the first and the last, from 1')
  tokens: int = columns.shown('tokens', 'that were emitted')
  acceptance: float | None = columns.shown(
    'acceptance', 'as in the other tables', '.3f'
  )
  acceptance_ci95: list[float] | None
  tokens_per_round: float = columns.shown(
    'tokens per round', 'as in the other tables', '.3f'
  )
  tokens_per_round_ci95: list[float] | None
  fixed: str | None = columns.shown('fixed', 'the twin of a method that learns')
  acceptance_over_fixed: float | None = columns.shown(
    'acceptance over fixed', "divided by the twin's", '.3f'
  )
  acceptance_over_fixed_ci95: list[float] | None
  updates: int = columns.shown('updates', 'of the weights')
  undone: int = columns.shown('undone', 'updates that gave NaN or infinity')


NAMES = tuple(columns.of(Window))


def of_run(
  methods: Mapping[str, methods_lib.Method],
  learning: Collection[str],
  batches: Mapping[str, Sequence[dict[str, Any]]],
) -> list[Window]:
  """Returns the windows of each method that drafts; none if none learns.

  Args:
    methods: all methods.
    learning: the names of those that learn.
    batches: the journal's records of each method, in the order of decoding.
  """
  if not learning:
    return []
  found = []
  for name, method in methods.items():
    if not method.drafter.num_draft_tokens:
      continue
    twin = _twin(name, methods, learning) if name in learning else None
    everything = np.arange(len(batches[name]))
    parts = np.array_split(everything, min(_PARTS, everything.size))
    for part in (everything, *parts):
      others = [batches[twin][i] for i in part] if twin else None
      records = [batches[name][i] for i in part]
      label = f'{part[0] + 1} to {part[-1] + 1}'
      found.append(_window(name, label, records, twin, others))
  return found


def _twin(name, methods, learning) -> str | None:
  same = methods[name].drafter, methods[name].verify
  return next(
    (
      other
      for other, one in methods.items()
      if other not in learning and (one.drafter, one.verify) == same
    ),
    None,
  )


def _window(name, label, records, twin, others) -> Window:
  runs = _generations(records)
  measured = ratios.measure(runs)
  ratio = ci95 = None
  if twin is not None:
    ratio, ci95 = ratios.ratio(runs, _generations(others), 'acceptance')
  return Window(
    method=name,
    batches=label,
    tokens=sum(len(run.tokens) for run in runs),
    acceptance=measured['acceptance'],
    acceptance_ci95=measured['acceptance_ci95'],
    tokens_per_round=measured['tokens_per_round'],
    tokens_per_round_ci95=measured['tokens_per_round_ci95'],
    fixed=twin,
    acceptance_over_fixed=ratio,
    acceptance_over_fixed_ci95=ci95,
    updates=sum(record.get('updates', 0) for record in records),
    undone=sum(record.get('undone', 0) for record in records),
  )


def _generations(
  records: Iterable[dict[str, Any]],
) -> list[rows_lib.Generation]:
  return [
    rows_lib.Generation.from_json(generation)
    for record in records
    for generation in record['generations']
  ]
