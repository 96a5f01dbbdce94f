"""Draft trees: which node follows which, and everything derived from that.

The nodes of a tree of N draft tokens are numbered 1 to N. Node 0 is the pending
token, the root. `parents` [N] holds the parent of each node, and every node
comes after its parent. On a chain, node i follows node i - 1.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import operator

import jax.numpy as jnp
import numpy as np

from specsample import indexing
from specsample.types import Array

# Acceptance rates of each rank, [k], or of each depth and rank, [depth, k].
Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Topology:
  """A tree that is the same in every round.

  Attributes:
    parents: [N] the parent of each node; see the module's docstring.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    """Checks that nodes come after their parents."""
    try:
      parents = tuple(map(operator.index, self.parents))
    except TypeError as error:
      raise ValueError(
        f"parents are {self.parents!r}: give the number of each node's parent, "
        'as in (0, 0, 1)'
      ) from error
    object.__setattr__(self, 'parents', parents)
    for i, parent in enumerate(self.parents):
      if not 0 <= parent <= i:
        raise ValueError(
          f'parents are {self.parents}: node {i + 1} follows node {parent}, '
          f'but must follow one of 0 to {i}; list parents before children'
        )

  @property
  def num_nodes(self) -> int:
    """The number of nodes, N."""
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """The depth [N] of each node: the draft tokens on its path, with itself."""
    depths = [0]
    for parent in self.parents:
      depths.append(depths[parent] + 1)
    return tuple(depths[1:])

  @property
  def depth(self) -> int:
    """The length of the longest path."""
    return max(self.depths, default=0)

  @functools.cached_property
  def ranks(self) -> tuple[int, ...]:
    """The rank [N] of each node: how many siblings come before it."""
    seen = [0] * (self.num_nodes + 1)
    ranks = []
    for parent in self.parents:
      ranks.append(seen[parent])
      seen[parent] += 1
    return tuple(ranks)

  @property
  def num_children(self) -> tuple[int, ...]:
    """The number of children [N + 1] of each node, the pending token first."""
    counts = [0] * (self.num_nodes + 1)
    for parent in self.parents:
      counts[parent] += 1
    return tuple(counts)

  def children(self, node: int) -> tuple[int, ...]:
    """Returns the children of a node, in order."""
    return tuple(i + 1 for i, p in enumerate(self.parents) if p == node)

  def level(self, depth: int) -> tuple[int, ...]:
    """Returns the nodes at a depth, in order; at 0 only the pending token."""
    if not depth:
      return (0,)
    return tuple(i + 1 for i, d in enumerate(self.depths) if d == depth)

  def paths(self) -> list[tuple[int, ...]]:
    """Returns the ranks along the path to each node.

    (0, 2) is the third child of the first child.
    """
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(self.parents, self.ranks, strict=True):
      paths.append((*paths[parent], rank))
    return paths[1:]


def chain(num_nodes: int) -> Topology:
  """Returns a chain: each node follows the one before."""
  return Topology(tuple(range(num_nodes)))


def k_ary(branching: Sequence[int]) -> Topology:
  """Returns a tree by levels: nodes of depth i have branching[i] children."""
  if not branching or any(count < 1 for count in branching):
    raise ValueError(
      f'branching is {tuple(branching)}: give the number of children per node, '
      'at least 1, for each depth'
    )
  parents: list[int] = []
  level = [0]
  for count in branching:
    first = len(parents) + 1
    parents += [parent for parent in level for _ in range(count)]
    level = list(range(first, len(parents) + 1))
  return Topology(tuple(parents))


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
  """Returns the tree of nodes that are given by the ranks along their paths.

  Raises:
    ValueError: if the parent or an earlier sibling of a path is missing, or a
      path is empty or occurs twice.
  """
  ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
  number: dict[tuple[int, ...], int] = {(): 0}
  parents = []
  for path in ordered:
    before = path[:-1]
    sibling = (*before, path[-1] - 1) if path and path[-1] else before
    if not path or path in number:
      raise ValueError(
        f'path {list(path)} is empty or occurs twice: give each path once'
      )
    if before not in number or sibling not in number:
      missing = before if before not in number else sibling
      raise ValueError(
        f'path {list(path)} needs path {list(missing)}, which is missing'
      )
    parents.append(number[before])
    number[path] = len(number)
  return Topology(tuple(parents))


# From Medusa's code, for Vicuna-7B: 63 nodes, found by simulation.
_MC_SIM_7B_63 = (
  '0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 '
  '8 9 100 020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 '
  '14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070'
)


def mc_sim_7b_63() -> Topology:
  """Returns the tree of Medusa (Cai et al., 2401.10774) for Vicuna-7B."""
  return from_paths(tuple(map(int, path)) for path in _MC_SIM_7B_63.split())


def best(acceptance: Acceptance, num_nodes: int, depth: int) -> Topology:
  """Returns the tree of num_nodes nodes that keeps the most drafts on average.

  Sequoia's dynamic program (Chen et al., 2402.12374, section 3.1): a child of
  rank r is kept with probability acceptance[r], wherever its parent is, or with
  acceptance[d - 1, r] if it is at depth d.

  Args:
    acceptance: [k] the probability that the child of each rank is the one kept,
      where a node has at most k children; or [depth, k].
    num_nodes: N.
    depth: the largest depth that a node may have.

  Raises:
    ValueError: if acceptance holds no probabilities, or num_nodes nodes do not
      fit.
  """
  rates = _rates(acceptance, depth)
  num_children = rates.shape[1]
  largest = sum(num_children**i for i in range(1, depth + 1))
  if num_nodes < 1 or num_nodes > largest:
    raise ValueError(
      f'num_nodes is {num_nodes}: with up to {num_children} children per node '
      f'and depth {depth}, give 1 to {largest}'
    )
  # worth[m]: expected drafts kept by the best m nodes below a node, within the
  # levels handled so far.
  worth = np.where(np.arange(num_nodes + 1) > 0, -np.inf, 0.0)
  sizes = []
  for of_level in rates[::-1]:
    worth, chosen = _allocate(of_level, worth)
    sizes.append(chosen)
  paths: list[tuple[int, ...]] = []

  def grow(path, depth, count):
    rank = 0
    while count:
      size = sizes[depth - 1][rank][count]
      child = (*path, rank)
      paths.append(child)
      grow(child, depth - 1, size - 1)
      count, rank = count - size, rank + 1

  grow((), depth, num_nodes)
  return from_paths(paths)


def expected_tokens(topology: Topology, acceptance: Acceptance) -> float:
  """Returns the expected tokens per round.

  A round emits one token, and each node if it and all nodes on its path are
  kept.

  Args:
    topology: the tree.
    acceptance: as for `best`. A node without a rate counts as never kept.
  """
  rates = _rates(acceptance, topology.depth)
  kept = [1.0]
  nodes = zip(topology.parents, topology.depths, topology.ranks, strict=True)
  for parent, depth, rank in nodes:
    rate = rates[depth - 1, rank] if rank < rates.shape[1] else 0.0
    kept.append(kept[parent] * rate)
  return float(sum(kept))


def _rates(acceptance, depth):
  """Returns acceptance as [depth, k], after checking it."""
  rates = np.asarray(acceptance, np.float64)
  is_rates = rates.ndim in (1, 2) and rates.size and (rates >= 0).all()
  if not is_rates or (rates.sum(axis=-1) > 1 + 1e-6).any():
    raise ValueError(
      f'acceptance is {acceptance}: give the probability that the child of '
      'each rank is kept, with a sum of at most 1'
    )
  if rates.ndim == 1:
    return np.tile(rates, (depth, 1))
  missing = max(0, depth - len(rates))
  return np.pad(rates, ((0, missing), (0, 0)))[:depth]


def _allocate(rates, worth):
  """Distributes m nodes among children, the first child first.

  Args:
    rates: [k].
    worth: [N + 1], of the best m nodes below a child.

  Returns:
    As `worth`, a level higher, and for each rank [N + 1] how many nodes its
    child gets, itself included, of m for it and its later siblings.
  """
  num_nodes = len(worth) - 1
  rest = np.where(np.arange(num_nodes + 1) > 0, -np.inf, 0.0)
  chosen: list[np.ndarray] = []
  for rate in rates[::-1]:
    value, size = rest * 1.0, np.zeros(num_nodes + 1, int)
    value[1:] = -np.inf
    for m in range(1, num_nodes + 1):
      # The child has s nodes in all, and its later siblings m - s.
      with np.errstate(invalid='ignore'):
        own = rate * np.where(worth[:m] > -np.inf, 1 + worth[:m], -np.inf)
      total = np.where(worth[:m] > -np.inf, own, -np.inf) + rest[m - 1 :: -1]
      best = int(np.argmax(total))
      value[m], size[m] = total[best], best + 1
    rest = value
    chosen.insert(0, size)
  return rest, chosen


def ancestors(parents: Array) -> Array:
  """Returns which nodes are on the path to each node, itself included.

  Takes parents [..., N] and returns [..., N + 1, N + 1] bool. Node 0 is on
  every path, but on none that begins at a node whose parent is -1.
  """
  size = parents.shape[-1] + 1
  behind = jnp.pad(parents, [(0, 0)] * (parents.ndim - 1) + [(1, 0)])
  nodes = jnp.arange(size)
  seen = (behind[..., None] == nodes) | (nodes[:, None] == nodes)
  # Each step doubles the reach, as a product because that takes least memory.
  for _ in range((size - 1).bit_length()):
    steps = seen.astype(jnp.float32)
    seen = jnp.einsum('...ij,...jk->...ik', steps, steps) > 0
  return seen


def depths(ancestors: Array) -> Array:
  """Returns node depths [..., N + 1] int32, from `ancestors`; 0 at the root."""
  return jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1


def path_to(ancestors: Array, node: Array, length: int) -> Array:
  """Returns the nodes [length] on the path to a node [], padded with 0.

  Args:
    ancestors: [N + 1, N + 1], of one sequence.
    node: [] int32.
    length: at least the depth of the node.
  """
  is_on = indexing.row(ancestors, node, None)
  depth = jnp.arange(1, length + 1)[:, None]
  is_there = is_on & (depths(ancestors) == depth)
  return jnp.sum(is_there * jnp.arange(is_on.size), axis=-1, dtype=jnp.int32)
