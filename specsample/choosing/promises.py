"""The speedup that a trained drafter promises, by its card and local times."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from specsample import cost
from specsample import policies
from specsample import tree

# Cost of a round with drafts beyond its pass and its drafting, in plain passes.
_OVERHEAD = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
  """The speedup that a drafter promises with its best chain or tree.

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
  passes: cost.PassTimes,
  batch_size: int,
  draft_seconds: Sequence[float],
) -> Promise:
  """Returns the promise of the chain with the best number of drafts.

  Args:
    name: the drafter's name.
    shares: [K], the shares of rounds that keep draft 1, 2, ... K, on its card.
    passes: the times of the target's passes.
    batch_size: number of rows.
    draft_seconds: [K + 1], the times of drafting 0, 1, ... K tokens.
  """
  costs = round_costs(passes, batch_size, draft_seconds)
  speedups = [
    cost.expected_tokens_by_position(shares[:length]) / costs[length]
    for length in range(1, len(costs))
  ]
  best = int(np.argmax(speedups))
  return Promise(name=name, speedup=speedups[best], costs=costs[: 2 + best])


def of_trees(
  name: str,
  acceptance: Sequence[Sequence[float]],
  passes: cost.PassTimes,
  batch_size: int,
  draft_seconds: Sequence[float],
  most_nodes: int,
) -> Promise:
  """Returns the promise of the best tree of at most `most_nodes` nodes.

  Args:
    name: the drafter's name.
    acceptance: [K, k], how often the draft of each rank is the one kept, given
      that those before it were, from its card.
    passes: the times of the target's passes.
    batch_size: number of rows.
    draft_seconds: [K + 1], the times of drafting 0, 1, ... K levels.
    most_nodes: the largest N to consider.
  """
  depth, num_children = np.shape(acceptance)
  largest = sum(num_children**i for i in range(1, depth + 1))
  return max(
    (
      of_tree(
        name,
        tree.best(acceptance, num_nodes, depth),
        *(acceptance, passes, batch_size, draft_seconds),
      )
      for num_nodes in range(1, min(most_nodes, largest) + 1)
    ),
    key=lambda promise: promise.speedup,
  )


def of_tree(
  name: str,
  topology: tree.Topology,
  acceptance: Sequence[Sequence[float]],
  passes: cost.PassTimes,
  batch_size: int,
  draft_seconds: Sequence[float],
) -> Promise:
  """Returns the promise of a tree; takes the arguments of `of_trees`.

  All levels are drafted and all nodes verified, however few are kept.
  """
  seconds = draft_seconds[topology.depth]
  of_round = _cost(passes, batch_size, topology.num_nodes, seconds)
  return Promise(
    name=name,
    speedup=tree.expected_tokens(topology, acceptance) / of_round,
    costs=(1.0, *[of_round] * topology.depth),
    topology=topology,
  )


def of_lattice(
  name: str,
  tokens_by_nodes: Mapping[str, float],
  passes: cost.PassTimes,
  batch_size: int,
  draft_seconds: Sequence[float],
  budget: policies.Budget | None = None,
) -> Promise:
  """Returns the promise of the most likely trees of a lattice.

  A round is taken to cost what its parts do or, if that was timed and is more,
  what the whole does.

  Args:
    name: the drafter's name.
    tokens_by_nodes: the tokens that rounds with the best 1, 3, ... nodes emit,
      on its card.
    passes: the times of the target's passes.
    batch_size: number of rows.
    draft_seconds: [K + 1], the last of which is the time of drafting.
    budget: has the costs of whole rounds; None if they were not timed.
  """
  costs = {
    nodes: _cost(passes, batch_size, int(nodes), draft_seconds[-1])
    for nodes in tokens_by_nodes
  }
  if budget is not None:
    costs = {
      nodes: max(of_parts, _whole(budget, int(nodes)))
      for nodes, of_parts in costs.items()
    }
  best = max(costs, key=lambda nodes: tokens_by_nodes[nodes] / costs[nodes])
  return Promise(
    name=name,
    speedup=tokens_by_nodes[best] / costs[best],
    costs=(1.0, *[costs[best]] * (len(draft_seconds) - 1)),
    num_nodes=max(map(int, tokens_by_nodes)),
    budget=budget,
  )


def round_costs(
  passes: cost.PassTimes, batch_size: int, draft_seconds: Sequence[float]
) -> tuple[float, ...]:
  """Returns the costs of rounds with 0, 1, ... K drafts, in plain passes.

  Args:
    passes: the times of the target's passes.
    batch_size: number of rows.
    draft_seconds: [K + 1], the times of drafting 0, 1, ... K tokens.
  """
  costs = [1.0]
  for length, seconds in enumerate(draft_seconds[1:], start=1):
    costs.append(_cost(passes, batch_size, length, seconds))
  return tuple(costs)


def ratio(passes: cost.PassTimes, batch_size: int, num_drafts: int) -> float:
  """Returns what a pass over pending token and drafts costs in plain passes."""
  return passes(batch_size * (num_drafts + 1)) / passes(batch_size)


def _cost(passes, batch_size, num_drafts, seconds):
  verified = ratio(passes, batch_size, num_drafts)
  return round(verified + seconds / passes(batch_size) + _OVERHEAD, 3)


def _whole(budget, num_nodes):
  """Returns the cost of a timed round, in plain rounds."""
  verified = np.interp(num_nodes, budget.ladder, budget.costs)
  return round(float(verified + budget.drafting) / budget.costs[0], 3)
