"""The rows of a finished ablation, one per tree."""

import dataclasses

from experiments.evaluation import table as table_lib
from experiments.reporting import rows as rows_lib
from experiments.trees import comparison
from experiments.trees import costs
from experiments.trees import stages
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRow:
  """A drafter with a tree; times are milliseconds of a round.

  Expected and predicted values follow from the acceptance by rank and the
  costs. They are None for a tree that depends on the text, and for drafts whose
  kind is not that of the tree with which the acceptance was counted.
  """

  method: str
  drafter: str
  topology: str
  is_chosen: bool
  law: str  # the kind of the drafts, a types.DraftKind
  num_nodes: int
  depth: int
  expected_tokens: float | None  # per round
  tokens_per_round: float
  over_chain: float  # tokens per round over those of the drafter's chain
  draft_ms: float
  verify_ms: float
  overhead_ms: float
  judge_ms: float  # the verification rule, a part of the overhead
  predicted_ms: float | None
  predicted_speedup: float | None
  speedup: float | None
  speedup_ci95: list[float] | None
  parents: list[int] | None  # of the topology

  @property
  def round_ms(self) -> float:
    """The sum of all parts."""
    return self.draft_ms + self.verify_ms + self.overhead_ms


def rows(compared: stages.Compared, table: table_lib.Table) -> list[TreeRow]:
  """Returns the rows of each drafter's trees, in the evaluation's order."""
  measured = {
    row.method: row for row in table.rows if row.category == rows_lib.OVERALL
  }
  chains = {
    entry.drafter: measured[entry.method_name].tokens_per_round
    for entry in compared.entries
    if entry.name == comparison.CHAIN
  }
  found = []
  for entry in compared.entries:
    row = measured[entry.method_name]
    prediction = _predict(compared, entry, row)
    parts = table.parts[entry.method_name]
    chosen = compared.chosen[entry.drafter]
    found.append(
      TreeRow(
        method=row.method,
        drafter=entry.drafter,
        topology=entry.name,
        is_chosen=entry.method_name == chosen.method_name,
        law=row.law,
        num_nodes=row.num_draft_tokens,
        depth=len(row.acceptance_by_position),
        expected_tokens=prediction.tokens if prediction else None,
        tokens_per_round=row.tokens_per_round,
        over_chain=row.tokens_per_round / chains[entry.drafter],
        draft_ms=parts['draft_ms'],
        verify_ms=parts['verify_ms'],
        overhead_ms=parts['overhead_ms'],
        judge_ms=parts['judge_ms'],
        predicted_ms=prediction.round_ms if prediction else None,
        predicted_speedup=prediction.speedup if prediction else None,
        speedup=row.speedup,
        speedup_ci95=row.speedup_ci95,
        parents=list(entry.topology.parents) if entry.topology else None,
      )
    )
  return found


def _predict(compared, entry, row) -> costs.Prediction | None:
  is_drawn = row.law != DraftKind.POINT_MASS.value and row.temperature != 0
  if entry.topology is None or is_drawn:
    return None
  return costs.predict(
    entry.topology,
    compared.counts[entry.drafter].acceptance,
    compared.costs[entry.drafter],
  )
