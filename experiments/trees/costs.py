"""What a round with a tree costs, and the tree that is chosen for it.

As Sequoia's choice for a machine (Chen et al., 2402.12374, section 3.3): what
counts is tokens a second, not tokens a round.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from specsample import cost
from specsample import tree


@dataclasses.dataclass(frozen=True)
class Costs:
  """Measured milliseconds of a round's parts; between them straight lines.

  Attributes:
    draft_ms: of drafting, by depth.
    verify_ms: of the target's pass, by nodes.
    overhead_ms: of the rest, by nodes.
    autoregressive_ms: of a round without a draft.
    widths: rising numbers of nodes, as a drafter has them: the target's pass
      then takes as long as over the first of these that holds the tree. Empty
      for a pass over just the tree.
  """

  draft_ms: Mapping[int, float]
  verify_ms: Mapping[int, float]
  overhead_ms: Mapping[int, float]
  autoregressive_ms: float
  widths: Sequence[int] = ()

  def __post_init__(self):
    """Refuses to say what was not measured at all."""
    for name in ('draft_ms', 'verify_ms', 'overhead_ms'):
      if not getattr(self, name):
        raise ValueError(f'{name} is empty: give at least one time')

  def round_ms(self, topology: tree.Topology) -> float:
    """Of drafting a tree, scoring it, and the rest."""
    nodes = topology.num_nodes
    read = cost.width_of(nodes, self.widths) if self.widths else nodes
    return (
      _between(self.draft_ms, topology.depth)
      + _between(self.verify_ms, read)
      + _between(self.overhead_ms, nodes)
    )


@dataclasses.dataclass(frozen=True)
class Prediction:
  """What the cost model says of a tree."""

  topology: tree.Topology
  tokens: float  # a round
  round_ms: float
  speedup: float  # over a round without a draft


def predict(
  topology: tree.Topology, acceptance: tree.Acceptance, costs: Costs
) -> Prediction:
  """The prediction for one tree; acceptance as `tree.best` takes it."""
  tokens = tree.expected_tokens(topology, acceptance)
  round_ms = costs.round_ms(topology)
  speedup = tokens * costs.autoregressive_ms / round_ms
  return Prediction(topology, tokens, round_ms, speedup)


def largest(depth: int, num_children: int) -> int:
  """N of the tree so deep whose nodes all have so many children."""
  return sum(num_children**i for i in range(1, depth + 1))


def fits(size: int, depth: int, num_children: int) -> bool:
  """Whether a tree of so many nodes is so deep, with at most k children."""
  return depth <= size <= largest(depth, num_children)


def grid(
  acceptance: tree.Acceptance, sizes: Sequence[int], depths: Sequence[int]
) -> list[tree.Topology]:
  """The best tree of each size and depth, as far as there are such."""
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
  """Of some trees the one of the highest predicted speedup."""
  predictions = [predict(one, acceptance, costs) for one in topologies]
  return max(predictions, key=lambda one: one.speedup)


def _between(times, at):
  known = sorted(times)
  return float(np.interp(at, known, [times[x] for x in known]))
