"""What trees of a drafter would keep, counted by the decoding loop.

`specsample.auto` reads both counts on a drafter's card, and chooses its tree.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.decoding import setup as setup_lib
from experiments.training import held_out
from specsample import drafters
from specsample import sharding
from specsample import stopping
from specsample import tree
from specsample.loop import step

_NUM_CHILDREN = 4  # of a node with children, in the tree that is counted
# Nodes of a lattice's trees. `auto` considers no larger ones.
_SIZES = (1, 3, 7, 15)


def measure(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> dict[str, Any]:
  """Returns what the card of a drafter says of its trees.

  For most drafters this is 'acceptance_by_rank' [K][4]: how often the draft of
  each rank is the one that is kept, by position, as `tree.best` takes it. For a
  drafter with a lattice (DFlash, DFlash2, DSpark) it is 'tokens_by_nodes': the
  tokens per round with its best trees of '1', '3', '7' and '15' nodes, whose
  shapes follow the text.

  Args:
    setup: decodes at temperature 0; its method is a drafter of chains.
    prompts: token ids, one list per prompt, which are decoded as one batch.
  """
  method = setup.method
  of_method = lambda method: dataclasses.replace(setup, method=method)
  if isinstance(method.drafter, drafters.DFlash):
    by_nodes = {}
    for size in _SIZES:
      trees = of_method(methods_lib.lattice_tree(method, size))
      decoded = held_out.decode(trees, prompts)
      by_nodes[str(size)] = decoded.tokens_per_round
    return {'tokens_by_nodes': by_nodes}
  probe = _probe(method.drafter.num_draft_tokens)
  trees = of_method(methods_lib.tree(method, probe))
  counts = _decode(trees, prompts, probe)
  return {'acceptance_by_rank': acceptance(counts).tolist()}


def for_card(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> dict[str, Any]:
  """Returns what `measure` does or, after a line that says why, nothing."""
  try:
    return measure(setup, prompts)
  except (TypeError, ValueError) as error:
    print(f'the card says nothing of trees: {error}')
    return {}


def count(
  topology: tree.Topology,
  drafted: Sequence[int],
  path: Sequence[int],
  num_emitted: int,
) -> np.ndarray:
  """Counts the children that were tried and kept in one round of a row.

  The children of a node are tried in order of rank, until one is kept.

  Args:
    topology: the draft's tree, of depth D.
    drafted: [N] tokens, -1 where none was drafted.
    path: the nodes that were kept, parents first.
    num_emitted: the tokens that the round emitted. They are one more than the
      nodes kept, unless the text ended with the last node.

  Returns:
    [2, D, k], how many children were tried and how many kept, by depth and
    rank.
  """
  counts = np.zeros((2, topology.depth, max(topology.num_children)), int)
  # Each emitted token was chosen at a node, whose children were tried.
  for depth, node in enumerate([0, *path][:num_emitted]):
    for rank, child in enumerate(topology.children(node)):
      if drafted[child - 1] < 0:
        continue
      counts[0, depth, rank] += 1
      if child in path:
        counts[1, depth, rank] += 1
        break
  return counts


def acceptance(counts: np.ndarray) -> np.ndarray:
  """Returns how often the child of each rank is the one kept, [D, k].

  That is the share kept of the children tried, times the probability that no
  earlier sibling was kept. So nodes may have different numbers of children
  (Kaplan and Meier, 1958). A rank that was never tried counts as never kept.
  """
  tried, kept = counts
  share = kept / np.maximum(tried, 1)
  none_before = np.cumprod(1 - share, axis=1)[:, :-1]
  return share * np.pad(none_before, ((0, 0), (1, 0)), constant_values=1)


def _probe(depth):
  """Returns a tree with children along the paths of the two best first drafts.

  Drafts after a second choice are counted too, because trees have some.
  """
  parents = [(first, *[0] * i) for first in (0, 1) for i in range(depth - 1)]
  return tree.from_paths(
    (*parent, rank)
    for parent in [(), *parents]
    for rank in range(_NUM_CHILDREN)
  )


def _decode(setup, prompts, topology) -> np.ndarray:
  """Returns the sum of `count` over all rounds of all rows."""
  stop = stopping.placed(setup.stop, setup.target.model)
  state = setup.prefill(prompts)
  total, is_over = np.zeros((), int), False
  while not is_over:
    found, state = _round(setup.decoder, setup.params, state, stop)
    *rows, is_done = jax.device_get(found)
    for drafted, path, num_kept, num_emitted in zip(*rows, strict=True):
      kept = path[:num_kept].tolist()
      total = total + count(topology, drafted, kept, num_emitted)
    is_over = is_done.all()
  return total


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def _round(decoder, params, state, stop):
  observed, state = step.step(decoder, params, state, stop)
  verdict = observed.verdict
  found = (
    observed.draft.tokens,
    verdict.path,
    verdict.num_accepted,
    observed.num_emitted,
    state.done,
  )
  return sharding.replicate(found), state
