"""How often the child of each rank is the one kept, counted while decoding."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.evaluation import evaluation as evaluation_lib
from specsample import sharding
from specsample import tree
from specsample.loop import step
from specsample.types import Origin


@dataclasses.dataclass(frozen=True)
class Counts:
  """By depth and rank, [depth][k]: how many children were tried, and kept.

  Those of a node are tried by rank, until one is kept.
  """

  tried: tuple[tuple[int, ...], ...]
  kept: tuple[tuple[int, ...], ...]

  @classmethod
  def none(cls, depth: int, num_children: int) -> 'Counts':
    """Of a tree so deep, and so many children of a node, before any round."""
    zeros = ((0,) * num_children,) * depth
    return cls(zeros, zeros)

  @property
  def acceptance(self) -> np.ndarray:
    """[depth, k], the probability that the child of each rank is the one kept.

    Of those tried a share is kept, and the ones before it were not. (So nodes
    may have different numbers of children: Kaplan and Meier, 1958.) What was
    never tried is never kept.
    """
    tried = np.asarray(self.tried)
    share = np.asarray(self.kept) / np.maximum(tried, 1)
    none_before = np.cumprod(1 - share, axis=1)
    none_before = np.pad(none_before, ((0, 0), (1, 0)), constant_values=1)
    return share * none_before[:, :-1]

  def __add__(self, other: 'Counts') -> 'Counts':
    add = lambda a, b: tuple(
      tuple(x + y for x, y in zip(*rows, strict=True))
      for rows in zip(a, b, strict=True)
    )
    return Counts(add(self.tried, other.tried), add(self.kept, other.kept))


def count(
  topology: tree.Topology,
  drafted: Sequence[int],
  emitted: Sequence[int],
  num_accepted: int,
) -> Counts:
  """What one round says.

  Each emitted token was asked for at a node, whose children were tried.

  Args:
    topology: of the draft.
    drafted: [N] tokens, -1 where none was drafted.
    emitted: tokens of the round, the accepted drafts the first of them.
    num_accepted: how many those are.
  """
  shape = topology.depth, max(topology.num_children)
  tried, kept = np.zeros(shape, int), np.zeros(shape, int)
  node = 0
  for depth, token in enumerate(emitted[: topology.depth]):
    is_kept = depth < num_accepted
    for rank, child in enumerate(topology.children(node)):
      if drafted[child - 1] < 0:
        continue
      tried[depth, rank] += 1
      if is_kept and drafted[child - 1] == token:
        kept[depth, rank] += 1
        node = child
        break
    if not is_kept:
      break
  return Counts(
    tuple(map(tuple, tried.tolist())), tuple(map(tuple, kept.tolist()))
  )


def decode(
  evaluation: evaluation_lib.Evaluation,
  method: methods_lib.Method,
  prompts: Sequence[list[int]],
  request_ids: Sequence[int],
) -> Counts:
  """Decodes prompts at once, round by round, and counts.

  Args:
    evaluation: the target and how it is decoded.
    method: its drafter is a `drafters.Tree`.
    prompts: as the model reads them.
    request_ids: [B], each selects a prompt's stream.
  """
  drafter: Any = method.drafter
  topology = drafter.topology
  setup = evaluation.setup(method)
  state = setup.prefill(prompts, request_ids=request_ids)
  total = Counts.none(topology.depth, max(topology.num_children))
  before = jax.device_get(_shown(state))
  while not before['done'].all():
    # The round drafts it again: it has the same keys.
    drafted = jax.device_get(_drafted(setup.params, state, **setup.components))
    state = setup.advance(state, 1)
    after = jax.device_get(_shown(state))
    for row in range(len(prompts)):
      new = slice(before['length'][row], after['length'][row])
      accepted = after['origin'][row, new] == Origin.ACCEPTED
      total += count(
        topology,
        drafted[row].tolist(),
        after['tokens'][row, new].tolist(),
        int(accepted.sum()),
      )
    before = after
  return total


@functools.partial(jax.jit, static_argnames=('model', 'drafter', 'verify'))
def _drafted(params, state, *, model, drafter, verify):
  draft, _ = step.propose(
    params, state, model=model, drafter=drafter, verify=verify
  )
  return sharding.replicate(draft.tokens)


@jax.jit
def _shown(state):
  names = ('length', 'done', 'tokens', 'origin')
  return sharding.replicate({name: getattr(state, name) for name in names})
