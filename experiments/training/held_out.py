"""Evaluation of a drafter on prompts and answers that it was not trained on.

The decoding loop answers prompts (`decode`), and answers of the target are
replayed (`evaluate`): at temperature 0 the target's own answer determines which
draft tokens it keeps. So one pass over the answer yields every draft token that
would be right, and walking through them round by round gives the counts of
decoding, without decoding.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.decoding import rounds
from experiments.decoding import setup as setup_lib
from experiments.training import training as training_lib
import specsample
from specsample import drafters
from specsample import sharding
from specsample import stats as stats_lib
from specsample import tree
from specsample.training import objective as objective_lib
from specsample.types import Params

_NUM_CHILDREN = 4  # of a node with children, in the tree that is counted
# Nodes of a lattice's trees. `auto` considers no larger ones.
_SIZES = (1, 3, 7, 15)


def evaluate(
  params: Any,
  batches: Iterable[Mapping[str, np.ndarray]],
  objective: objective_lib.Objective,
  eos_ids: Sequence[int] = (),
) -> tuple[float, stats_lib.Stats]:
  """Returns the mean loss, and the counts of greedy decoding.

  `params` is the whole tree, in the dtype of the computation. The batches are
  of greedy answers, which end with one of `eos_ids` or at their limit.
  """
  losses, weights, counts = [], [], []
  for batch in batches:
    loss, matches = _evaluate(params, place(batch), objective=objective)
    losses.append(float(loss))
    weights.append(batch['mask'].sum())
    ends = np.isin(batch['tokens'], eos_ids)
    counts.append(replay(np.asarray(matches), batch['mask'], ends))
  total = functools.reduce(lambda a, b: a + b, counts)
  return float(np.average(losses, weights=weights)), total


def replay(
  matches: np.ndarray, mask: np.ndarray, ends: np.ndarray
) -> stats_lib.Stats:
  """Counts the rounds in which greedy decoding writes the answers.

  Args:
    matches: [K, B, T] bool, as `objective.Objective.matches`.
    mask: [B, T] bool, the tokens of the answers; each contiguous run in a row
      is an answer.
    ends: [B, T] bool, the tokens that end a text. An answer that ends with any
      other token was cut at its limit.
  """
  num_drafts = len(matches)
  leading = np.cumprod(matches, axis=0, dtype=np.int32).sum(axis=0)
  proposed = np.zeros(num_drafts + 1, int)
  accepted = np.zeros(num_drafts + 1, int)
  edges = np.diff(mask.astype(int), axis=1, prepend=0, append=0)
  for kept, edge, is_end in zip(leading, edges, ends, strict=True):
    starts, stops = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    for pending, last in zip(starts - 1, stops - 1, strict=True):
      while pending < last:
        # A round emits the kept drafts and one more token, up to the limit.
        room = num_drafts if is_end[last] else last - pending - 1
        drafted = min(num_drafts, room)
        emitted = min(kept[pending], drafted)
        proposed[drafted] += 1
        accepted[emitted] += 1
        pending += emitted + 1
  return stats_lib.Stats(
    tokens=int(mask.sum()),
    rounds=int(proposed.sum()),
    proposed=tuple(proposed.tolist()),
    accepted=tuple(accepted.tolist()),
  )


def place(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Returns the batch on the devices, with its rows and tokens sharded."""
  tokens = lambda name: None if name == 'starts' else 'tokens'
  axes = {
    k: ('batch', tokens(k), *[None] * (x.ndim - 2)) for k, x in batch.items()
  }
  return sharding.place(dict(batch), axes)


@functools.partial(jax.jit, static_argnames=('objective',))
def _evaluate(params, batch, *, objective):
  loss, _ = objective(params, batch)
  return sharding.replicate((loss, objective.matches(params, batch)))


def choose_prompts(
  training: training_lib.Training, prompts: Sequence[np.ndarray]
) -> list[list[int]]:
  """Chooses `decoded_prompts` evenly spaced held-out prompts, or all.

  Each is cut to its last `decoded_prompt_tokens` tokens.
  """
  count = min(training.decoded_prompts, len(prompts))
  room = training.target.model.max_length - training.decoded_new_tokens
  if training.decoded_prompt_tokens > room:
    raise ValueError(
      f'Training.decoded_prompt_tokens is {training.decoded_prompt_tokens} and '
      f'decoded_new_tokens is {training.decoded_new_tokens}, but the target '
      f'takes {training.target.model.max_length} tokens: lower one of them'
    )
  chosen = [i * len(prompts) // count for i in range(count)]
  most = training.decoded_prompt_tokens
  return [prompts[i][-most:].tolist() for i in chosen]


def setup(training: training_lib.Training, params: Params) -> setup_lib.Setup:
  """Returns what decodes with a drafter in training, at temperature 0.

  `params` is the whole tree, in the dtype of the computation.
  """
  target = dataclasses.replace(training.target, params=params['target'])
  return setup_lib.Setup(
    target=target,
    method=methods_lib.Method(training.drafter, params=params['drafter']),
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=training.decoded_new_tokens,
    stop=specsample.Stop(eos_ids=target.tokenizer.eos_ids),
  )


def decode(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> stats_lib.Stats:
  """Decodes all prompts as one batch, and counts tokens and drafts.

  The parameters are arguments of the compiled loop, so it is compiled once.
  """
  return stats_lib.summarize(setup.generate(prompts))


def measure_trees(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> dict[str, Any]:
  """Returns what the card of a drafter says of its trees.

  For most drafters this is 'acceptance_by_rank' [K][4]: how often the draft of
  each rank is the one that is kept, by position, as `tree.best` takes it. For a
  drafter with a lattice (DFlash, DFlash2, DSpark) it is 'tokens_by_nodes': the
  tokens per round with its best trees of '1', '3', '7' and '15' nodes, whose
  shapes follow the text.

  The setup decodes the prompts as one batch at temperature 0; its method is a
  drafter of chains.
  """
  method = setup.method
  of_method = lambda method: dataclasses.replace(setup, method=method)
  if isinstance(method.drafter, drafters.DFlash):
    by_nodes = {}
    for size in _SIZES:
      trees = of_method(methods_lib.lattice_tree(method, size))
      decoded = decode(trees, prompts)
      by_nodes[str(size)] = decoded.tokens_per_round
    return {'tokens_by_nodes': by_nodes}
  probe = _probe(method.drafter.num_draft_tokens)
  trees = of_method(methods_lib.tree(method, probe))
  counts = _count_all(trees, prompts, probe)
  return {'acceptance_by_rank': acceptance_by_rank(counts).tolist()}


def trees_for_card(
  setup: setup_lib.Setup, prompts: Sequence[list[int]]
) -> dict[str, Any]:
  """Returns what `measure_trees` does or, after saying why, nothing."""
  try:
    return measure_trees(setup, prompts)
  except (TypeError, ValueError) as error:
    print(f'the card says nothing of trees: {error}')
    return {}


def count_tried(
  topology: tree.Topology,
  drafted: Sequence[int],
  path: Sequence[int],
  num_emitted: int,
) -> np.ndarray:
  """Counts the children that were tried and kept in one round of a row.

  Returns [2, D, k], how many were tried and how many kept, by depth and rank.
  The children of a node are tried in order of rank, until one is kept.

  Args:
    topology: the draft's tree, of depth D.
    drafted: [N] tokens, -1 where none was drafted.
    path: the nodes that were kept, parents first.
    num_emitted: the tokens that the round emitted. They are one more than the
      nodes kept, unless the text ended with the last node.
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


def acceptance_by_rank(counts: np.ndarray) -> np.ndarray:
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


def _count_all(setup, prompts, topology) -> np.ndarray:
  """Returns the sum of `count_tried` over all rounds of all rows."""
  state, total = setup.prefill(prompts), np.zeros((), int)
  while True:
    found, state = rounds.step(setup, state)
    found = jax.device_get(found)
    if not found['has_round'].any():
      return total
    for row in np.flatnonzero(found['has_round']):
      path = (1 + np.flatnonzero(found['is_kept'][row])).tolist()
      num_emitted = len(path) + found['has_next'][row]
      drafted = found['tokens'][row]
      total = total + count_tried(topology, drafted, path, num_emitted)
