"""Counts how often the child of each rank is kept, while decoding."""

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
  """Numbers of children tried and kept, by depth and rank: [depth][k].

  The children of a node are tried in order of rank, until one is kept.
  """

  tried: tuple[tuple[int, ...], ...]
  kept: tuple[tuple[int, ...], ...]

  @classmethod
  def none(cls, depth: int, num_children: int) -> 'Counts':
    """Returns zero counts for `depth` levels and `num_children` ranks."""
    zeros = ((0,) * num_children,) * depth
    return cls(zeros, zeros)

  @property
  def acceptance(self) -> np.ndarray:
    """The probability [depth, k] that the child of each rank is the one kept.

    It is the share kept of the children that were tried, times the probability
    that no earlier sibling was kept, so nodes may have different numbers of
    children (Kaplan and Meier, 1958). A rank that was never tried counts as
    never kept.
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
  """Counts the children that were tried and kept in one round.

  Each emitted token was drawn at a node, whose children were tried.

  Args:
    topology: the draft's tree.
    drafted: [N] tokens, -1 where none was drafted.
    emitted: the round's tokens, the accepted draft tokens first.
    num_accepted: the number of accepted draft tokens.
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
  """Decodes a batch of prompts, round by round, and counts.

  Args:
    evaluation: the target and how it is decoded.
    method: its drafter is a `drafters.Tree`.
    prompts: token ids, one list per prompt.
    request_ids: [B], each selects a prompt's random stream.
  """
  drafter: Any = method.drafter
  topology = drafter.topology
  setup = evaluation.setup(method)
  state = setup.prefill(prompts, request_ids=request_ids)
  total = Counts.none(topology.depth, max(topology.num_children))
  before = jax.device_get(_shown(state))
  while not before['done'].all():
    # The round drafts the same tokens again, because it has the same keys.
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
