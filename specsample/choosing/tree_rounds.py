"""Times of whole rounds of a tree that is cut to given numbers of nodes."""

from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import types
from specsample import verify
from specsample.drafters import adaptive
from specsample.loop import decode
from specsample.policies import policy
from specsample.types import Array, Drafter, Model, Params

# Rounds in a compiled loop.
ROUNDS = 4


@types.pytree
class _Size:
  """Whether the drafter runs in a round, and how many nodes are verified."""

  is_drafted: Array  # [] bool, whether the drafter runs at all
  num_nodes: Array  # [] int32, verified nodes


class _OfSize(policy.Length):
  """Keeps the first nodes, as many as its state says."""

  reads_token = True

  def init(self, num_draft_tokens):
    """See `policy.Policy`."""
    del num_draft_tokens
    return _Size(is_drafted=jnp.asarray(True), num_nodes=jnp.int32(0))

  def length(self, state, over):
    """See `policy.Policy`."""
    del over
    return jnp.where(state.is_drafted, np.iinfo(np.int32).max, 0)

  def passes(self, draft, state, over=False):
    """See `policy.Policy`; nodes come after their parents."""
    del over
    return jnp.arange(draft.tokens.size) < state.num_nodes

  def update(self, drafted, kept, state, over):
    """See `policy.Policy`."""
    del drafted, kept, over
    return state


def seconds(
  params: Params,
  model: Model,
  drafter: Drafter,
  ladder: Sequence[int],
  *,
  length: int,
  batch: int,
  rounds: int = ROUNDS,
  repeats: int = 9,
) -> dict[str, list[float]]:
  """Times rounds whose drafts have each number of nodes, and rounds without.

  All run one executable, that of an `Adaptive` drafter, and take turns, so that
  a slowdown of the machine affects all of them.

  Args:
    params: {'target': ..., 'drafter': ...}.
    model: the target.
    drafter: drafts trees of N nodes.
    ladder: numbers of nodes, rising from 0 to N.
    length: tokens of each row before the first round.
    batch: number of rows.
    rounds: rounds in a compiled loop; the least time of an empty loop is
      subtracted.
    repeats: how often each loop is timed.

  Returns:
    The seconds per round, [repeats], by the number of nodes, and of a round in
    which the drafter does not run, by 'plain'.
  """
  sized = adaptive.Adaptive(
    drafter=drafter, policies=(_OfSize(),), widths=ladder
  )
  components: dict[str, Any] = {
    'model': model,
    'drafter': sized,
    'verify': verify.tree,
  }
  size = lambda drafted, n: _Size(is_drafted=drafted, num_nodes=n)
  sizes = {'plain': size(False, 0)} | {str(n): size(True, n) for n in ladder}
  start = decode.prefill(
    params,
    np.ones((batch, length), np.int32),
    np.full(batch, length),
    jax.random.key(0),
    max_new_tokens=1 + rounds * (drafter.depth + 1),
    sampling=sampling_lib.Sampling(temperature=0.0),
    **components,
  )
  taken: dict[str, list[float]] = {name: [] for name in sizes}
  of_calls: dict[str, list[float]] = {name: [] for name in sizes}
  for repeat in range(repeats + 1):
    for name, of_rounds in sizes.items():
      for count, found in ((0, of_calls[name]), (rounds, taken[name])):
        state = jax.block_until_ready(_sized(start, of_rounds))
        begin = time.perf_counter()
        after = decode.advance(
          params, state, max_rounds=np.int32(count), **components
        )
        jax.block_until_ready(after)
        if repeat:  # the first one compiles
          found.append(time.perf_counter() - begin)
  return {
    name: [(x - min(of_calls[name])) / rounds for x in found]
    for name, found in taken.items()
  }


def _sized(start, size):
  """Returns a copy of a state, which `advance` consumes, for such rounds."""
  state = jax.tree.map(jnp.copy, start)
  (of_rows,) = state.draft.policies
  draft = dataclasses.replace(
    state.draft, policies=(jax.tree.map(jnp.full_like, of_rows, size),)
  )
  return dataclasses.replace(state, draft=draft)
