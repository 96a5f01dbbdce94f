"""The cost of a round with a tree, and the choice of a tree by its cost.

As in Sequoia's choice of a tree for a machine (Chen et al., 2402.12374, section
3.3), the criterion is tokens per second, not tokens per round.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from specsample import tree


@dataclasses.dataclass(frozen=True)
class Costs:
  """Measured milliseconds of a round's parts, interpolated linearly.

  Attributes:
    draft_ms: drafting, by depth.
    verify_ms: the target's pass, by number of nodes.
    overhead_ms: the rest, by number of nodes.
    autoregressive_ms: a round without a draft.
  """

  draft_ms: Mapping[int, float]
  verify_ms: Mapping[int, float]
  overhead_ms: Mapping[int, float]
  autoregressive_ms: float

  def __post_init__(self):
    """Raises ValueError if a part has no measured time."""
    for name in ('draft_ms', 'verify_ms', 'overhead_ms'):
      if not getattr(self, name):
        raise ValueError(f'{name} is empty: give at least one time')

  def round_ms(self, topology: tree.Topology) -> float:
    """Returns the time of drafting a tree, scoring it, and the rest."""
    nodes = topology.num_nodes
    return (
      _between(self.draft_ms, topology.depth)
      + _between(self.verify_ms, nodes)
      + _between(self.overhead_ms, nodes)
    )


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The cost model's prediction for a tree."""

  topology: tree.Topology
  tokens: float  # per round
  round_ms: float
  speedup: float  # over a round without a draft


def predict(
  topology: tree.Topology, acceptance: tree.Acceptance, costs: Costs
) -> Prediction:
  """Returns the prediction for a tree; `acceptance` is as for `tree.best`."""
  tokens = tree.expected_tokens(topology, acceptance)
  round_ms = costs.round_ms(topology)
  speedup = tokens * costs.autoregressive_ms / round_ms
  return Prediction(topology, tokens, round_ms, speedup)


def largest(depth: int, num_children: int) -> int:
  """Returns the size of the full tree with that depth and branching."""
  return sum(num_children**i for i in range(1, depth + 1))


def fits(size: int, depth: int, num_children: int) -> bool:
  """Returns whether a tree with that size, depth and branching exists."""
  return depth <= size <= largest(depth, num_children)


def grid(
  acceptance: tree.Acceptance, sizes: Sequence[int], depths: Sequence[int]
) -> list[tree.Topology]:
  """Returns the best tree of each size and depth that are possible."""
  num_children = np.asarray(acceptance).shape[-1]
  found = [
    tree.best(acceptance, size, depth)
    for size in sizes
    for depth in depths
    if fits(size, depth, num_children)
  ]
  return list(dict.fromkeys(found))


def choose(
  topologies: Sequence[tree.Topology],
  acceptance: tree.Acceptance,
  costs: Costs,
) -> Prediction:
  """Returns the prediction for the tree with the highest predicted speedup."""
  predictions = [predict(one, acceptance, costs) for one in topologies]
  return max(predictions, key=lambda one: one.speedup)


def _between(times, at):
  known = sorted(times)
  return float(np.interp(at, known, [times[x] for x in known]))
