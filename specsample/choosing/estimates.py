"""The speedup to expect of a trained drafter, by its card and local times."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from specsample import cost
from specsample import policies
from specsample import tree

# Cost of a round with drafts beyond its pass and its drafting, in plain passes.
_OVERHEAD = 0.05


@dataclasses.dataclass(frozen=True)
class PartTimes:
  """Seconds of the parts of a round on the machine at hand.

  Attributes:
    passes: t(n), of the target's pass over n tokens of each row.
    drafting: [K + 1], of drafting 0, 1, ... K tokens (levels of a tree) for
      each row.
  """

  passes: cost.PassTimes
  drafting: Sequence[float]

  def pass_cost(self, num_drafts: int) -> float:
    """Returns the cost of a pass over so many drafts, in plain passes."""
    return self.passes(num_drafts + 1) / self.passes(1)

  def cost(self, num_drafts: int, depth: int | None = None) -> float:
    """Returns the cost of a round, in plain passes.

    Args:
      num_drafts: N, the drafts of each row.
      depth: levels of their tree; None for a chain.
    """
    seconds = self.drafting[num_drafts if depth is None else depth]
    of_parts = self.pass_cost(num_drafts) + seconds / self.passes(1)
    return round(of_parts + _OVERHEAD, 3)

  def costs(self) -> tuple[float, ...]:
    """Returns the costs of rounds with 0, 1, ... K drafts, in plain passes."""
    return (1.0, *map(self.cost, range(1, len(self.drafting))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """The speedup to expect of a drafter with its best chain or tree.

  Attributes:
    name: the drafter's name.
    speedup: the speedup over plain decoding.
    costs: [D + 1], the costs of rounds with drafts 0, 1, ... D deep, in plain
      passes; the first is 1.
    topology: the tree; None for a chain of D drafts.
    num_nodes: the nodes of a lattice's trees, None for other drafts.
    budget: the costs of whole rounds of a lattice, None if they were not timed.
  """

  name: str
  speedup: float
  costs: tuple[float, ...]
  topology: tree.Topology | None = None
  num_nodes: int | None = None
  budget: policies.Budget | None = None

  @property
  def depth(self) -> int:
    """D, the number of drafts in a chain or the depth of a tree."""
    return len(self.costs) - 1


def of_chain(
  name: str,
  shares: Sequence[float],
  times: PartTimes,
) -> Estimate:
  """Returns the estimate of the chain with the best number of drafts.

  Args:
    name: the drafter's name.
    shares: [K], the shares of rounds that keep draft 1, 2, ... K, on its card.
    times: of the parts of its rounds.
  """
  costs = times.costs()
  speedups = [
    cost.expected_tokens_by_position(shares[:length]) / costs[length]
    for length in range(1, len(costs))
  ]
  best = int(np.argmax(speedups))
  return Estimate(name=name, speedup=speedups[best], costs=costs[: 2 + best])


def of_trees(
  name: str,
  acceptance: Sequence[Sequence[float]],
  times: PartTimes,
  most_nodes: int,
) -> Estimate:
  """Returns the estimate of the best tree of at most `most_nodes` nodes.

  All levels of a tree are drafted and all nodes verified, however few are kept.

  Args:
    name: the drafter's name.
    acceptance: [K, k], how often the draft of each rank is the one kept, given
      that those before it were, from its card.
    times: of the parts of its rounds.
    most_nodes: the largest N to consider.
  """
  depth, num_children = np.shape(acceptance)
  largest = sum(num_children**i for i in range(1, depth + 1))

  def of_tree(topology):
    of_round = times.cost(topology.num_nodes, topology.depth)
    return Estimate(
      name=name,
      speedup=tree.expected_tokens(topology, acceptance) / of_round,
      costs=(1.0, *[of_round] * topology.depth),
      topology=topology,
    )

  return max(
    (
      of_tree(tree.best(acceptance, num_nodes, depth))
      for num_nodes in range(1, min(most_nodes, largest) + 1)
    ),
    key=lambda estimate: estimate.speedup,
  )


def of_lattice(
  name: str,
  tokens_by_nodes: Mapping[str, float],
  times: PartTimes,
  budget: policies.Budget | None = None,
) -> Estimate:
  """Returns the estimate of the most likely trees of a lattice.

  A round is taken to cost what its parts do or, if that was timed and is more,
  what the whole does.

  Args:
    name: the drafter's name.
    tokens_by_nodes: the tokens that rounds with the best 1, 3, ... nodes emit,
      on its card.
    times: of the parts of its rounds; drafting takes the last of its times.
    budget: has the costs of whole rounds; None if they were not timed.
  """
  costs = {nodes: times.cost(int(nodes), depth=-1) for nodes in tokens_by_nodes}
  if budget is not None:
    costs = {
      nodes: max(of_parts, _whole(budget, int(nodes)))
      for nodes, of_parts in costs.items()
    }
  best = max(costs, key=lambda nodes: tokens_by_nodes[nodes] / costs[nodes])
  return Estimate(
    name=name,
    speedup=tokens_by_nodes[best] / costs[best],
    costs=(1.0, *[costs[best]] * (len(times.drafting) - 1)),
    num_nodes=max(map(int, tokens_by_nodes)),
    budget=budget,
  )


def _whole(budget, num_nodes):
  """Returns the cost of a timed round, in plain rounds."""
  verified = np.interp(num_nodes, budget.ladder, budget.costs)
  return round(float(verified + budget.drafting) / budget.costs[0], 3)
