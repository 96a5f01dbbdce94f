"""Draft trees: which node follows which, and what follows from that.

The nodes of a tree of N drafts are numbered 1 to N, and 0 is the pending token,
which all of them follow. `parents` [N] names the node before each, and a node
comes behind its parent. On a chain node i follows node i - 1.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import operator

import jax.numpy as jnp
import numpy as np

from specsample import indexing
from specsample.types import Array

# Of each rank, [k], or of each depth and rank, [depth, k].
Acceptance = Sequence[float] | Sequence[Sequence[float]] | np.ndarray


@dataclasses.dataclass(frozen=True)
class Topology:
  """A tree that is the same in every round.

  Attributes:
    parents: [N] node before each node; see the module.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    """Refuses nodes that come before their parents.

    Raises:
      ValueError: naming the first such node.
    """
    try:
      parents = tuple(map(operator.index, self.parents))
    except TypeError as error:
      raise ValueError(
        f'parents are {self.parents!r}: give the number of the node before '
        'each, (0, 0, 1)'
      ) from error
    object.__setattr__(self, 'parents', parents)
    for i, parent in enumerate(self.parents):
      if not 0 <= parent <= i:
        raise ValueError(
          f'parents are {self.parents}: node {i + 1} follows node {parent}, '
          f'which has to be one of 0 to {i}; list parents before children'
        )

  @property
  def num_nodes(self) -> int:
    """N."""
    return len(self.parents)

  @functools.cached_property
  def depths(self) -> tuple[int, ...]:
    """[N] how many drafts each path has, its node counted in."""
    depths = [0]
    for parent in self.parents:
      depths.append(depths[parent] + 1)
    return tuple(depths[1:])

  @property
  def depth(self) -> int:
    """Of the longest path."""
    return max(self.depths, default=0)

  @functools.cached_property
  def ranks(self) -> tuple[int, ...]:
    """[N] how many siblings each node has before it."""
    seen = [0] * (self.num_nodes + 1)
    ranks = []
    for parent in self.parents:
      ranks.append(seen[parent])
      seen[parent] += 1
    return tuple(ranks)

  @property
  def num_children(self) -> tuple[int, ...]:
    """[N + 1] of each node, that of the pending token first."""
    counts = [0] * (self.num_nodes + 1)
    for parent in self.parents:
      counts[parent] += 1
    return tuple(counts)

  def children(self, node: int) -> tuple[int, ...]:
    """The nodes that follow one, in order."""
    return tuple(i + 1 for i, p in enumerate(self.parents) if p == node)

  def level(self, depth: int) -> tuple[int, ...]:
    """The nodes of a depth, in order; 0 has the pending token alone."""
    if not depth:
      return (0,)
    return tuple(i + 1 for i, d in enumerate(self.depths) if d == depth)

  def paths(self) -> list[tuple[int, ...]]:
    """The ranks on the way to each node: [0, 2] is the first's third child."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(self.parents, self.ranks, strict=True):
      paths.append((*paths[parent], rank))
    return paths[1:]


def chain(num_nodes: int) -> Topology:
  """Each node follows the one before."""
  return Topology(tuple(range(num_nodes)))


def k_ary(branching: Sequence[int]) -> Topology:
  """Every node of depth i has branching[i] children, level by level."""
  if not branching or any(count < 1 for count in branching):
    raise ValueError(
      f'branching is {tuple(branching)}: give the children of a node, at least '
      '1, for each depth'
    )
  parents: list[int] = []
  level = [0]
  for count in branching:
    first = len(parents) + 1
    parents += [parent for parent in level for _ in range(count)]
    level = list(range(first, len(parents) + 1))
  return Topology(tuple(parents))


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
  """The tree of nodes that are named by the ranks on the way to them.

  Raises:
    ValueError: a path whose beginning, or whose earlier sibling, is missing; a
      path that is there twice.
  """
  ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
  number: dict[tuple[int, ...], int] = {(): 0}
  parents = []
  for path in ordered:
    before = path[:-1]
    sibling = (*before, path[-1] - 1) if path and path[-1] else before
    if not path or path in number:
      raise ValueError(f'path {list(path)} is there twice, or empty')
    if before not in number or sibling not in number:
      missing = before if before not in number else sibling
      raise ValueError(
        f'path {list(path)} needs path {list(missing)}, which is missing'
      )
    parents.append(number[before])
    number[path] = len(number)
  return Topology(tuple(parents))


# Of Medusa's code, for Vicuna-7B: 63 nodes, found by simulation.
_MC_SIM_7B_63 = (
  '0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 '
  '8 9 100 020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 '
  '14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070'
)


def mc_sim_7b_63() -> Topology:
  """The tree of Medusa (Cai et al., 2401.10774) for Vicuna-7B."""
  return from_paths(tuple(map(int, path)) for path in _MC_SIM_7B_63.split())


def best(acceptance: Acceptance, num_nodes: int, depth: int) -> Topology:
  """The tree of so many nodes that keeps the most drafts in expectation.

  Sequoia's dynamic program (Chen et al., 2402.12374, section 3.1): a child of
  rank r is kept with probability acceptance[r], wherever its parent is, or with
  acceptance[d - 1, r] where it is d drafts deep.

  Args:
    acceptance: [k] the probability that the child of each rank is the one kept,
      for the at most k children of a node; or [depth, k].
    num_nodes: N.
    depth: of the longest path at most.

  Raises:
    ValueError: no probabilities, or so many nodes do not fit.
  """
  rates = _rates(acceptance, depth)
  num_children = rates.shape[1]
  largest = sum(num_children**i for i in range(1, depth + 1))
  if num_nodes < 1 or num_nodes > largest:
    raise ValueError(
      f'num_nodes is {num_nodes}: {num_children} children of a node in depth '
      f'{depth} are 1 to {largest}'
    )
  # worth[m]: of the best m nodes behind a node, at most so deep.
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
  """Tokens a round: one, and each node if it and all on the way to it are kept.

  Args:
    topology: the tree.
    acceptance: as `best` takes it. What has no rate counts as never kept.
  """
  rates = _rates(acceptance, topology.depth)
  kept = [1.0]
  nodes = zip(topology.parents, topology.depths, topology.ranks, strict=True)
  for parent, depth, rank in nodes:
    rate = rates[depth - 1, rank] if rank < rates.shape[1] else 0.0
    kept.append(kept[parent] * rate)
  return float(sum(kept))


def _rates(acceptance, depth):
  """Acceptance [depth, k], given so or for all depths at once."""
  rates = np.asarray(acceptance, np.float64)
  is_rates = rates.ndim in (1, 2) and rates.size and (rates >= 0).all()
  if not is_rates or (rates.sum(axis=-1) > 1 + 1e-6).any():
    raise ValueError(
      f'acceptance is {acceptance}: give for each rank the probability that '
      'its child is kept, of sum at most 1'
    )
  if rates.ndim == 1:
    return np.tile(rates, (depth, 1))
  missing = max(0, depth - len(rates))
  return np.pad(rates, ((0, missing), (0, 0)))[:depth]


def _allocate(rates, worth):
  """Shares m nodes out among children, the first of them first.

  Args:
    rates: [k]. worth: [N + 1], of the best m nodes behind a child.

  Returns:
    As `worth`, a level higher, and for each rank [N + 1] how many nodes its
    child is given, itself included, of m for it and those behind.
  """
  num_nodes = len(worth) - 1
  rest = np.where(np.arange(num_nodes + 1) > 0, -np.inf, 0.0)
  chosen: list[np.ndarray] = []
  for rate in rates[::-1]:
    value, size = rest * 1.0, np.zeros(num_nodes + 1, int)
    value[1:] = -np.inf
    for m in range(1, num_nodes + 1):
      # A child of s nodes, and m - s for those behind it.
      with np.errstate(invalid='ignore'):
        own = rate * np.where(worth[:m] > -np.inf, 1 + worth[:m], -np.inf)
      total = np.where(worth[:m] > -np.inf, own, -np.inf) + rest[m - 1 :: -1]
      best = int(np.argmax(total))
      value[m], size[m] = total[best], best + 1
    rest = value
    chosen.insert(0, size)
  return rest, chosen


def ancestors(parents: Array) -> Array:
  """[..., N + 1, N + 1] bool: which nodes are on the way to each, itself too.

  Of parents [..., N]. Node 0 is on the way to all.
  """
  size = parents.shape[-1] + 1
  behind = jnp.pad(parents, [(0, 0)] * (parents.ndim - 1) + [(1, 0)])
  nodes = jnp.arange(size)
  seen = (behind[..., None] == nodes) | (nodes[:, None] == nodes)
  # Twice as far each time, as a product because that takes the least memory.
  for _ in range((size - 1).bit_length()):
    steps = seen.astype(jnp.float32)
    seen = jnp.einsum('...ij,...jk->...ik', steps, steps) > 0
  return seen


def depths(ancestors: Array) -> Array:
  """[..., N + 1] int32, of the pending token 0, of `ancestors`."""
  return jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1


def path_to(ancestors: Array, node: Array, length: int) -> Array:
  """The nodes [length] on the way to a node [], 0 behind the last.

  Args:
    ancestors: [N + 1, N + 1], of one sequence.
    node: [] int32.
    length: at least the depth of the node.
  """
  is_on = indexing.row(ancestors, node, None)
  depth = jnp.arange(1, length + 1)[:, None]
  is_there = is_on & (depths(ancestors) == depth)
  return jnp.sum(is_there * jnp.arange(is_on.size), axis=-1, dtype=jnp.int32)
