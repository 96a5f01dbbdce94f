"""Times of whole rounds of a tree that is cut to given numbers of nodes."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import types
from specsample import verify
from specsample.choosing import loops
from specsample.drafter import Drafter
from specsample.drafters import adaptive
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.policies import policy
from specsample.types import Array, Model, Params

# Rounds in a compiled loop.
ROUNDS = 4


@types.pytree
class _Size:
  """Whether the drafter runs in a round, and how many nodes are verified."""

  is_drafted: Array  # [] bool, whether the drafter runs at all
  num_nodes: Array  # [] int32, verified nodes


class _OfSize(policy.Policy):
  """Keeps the first nodes, as many as its state says."""

  reads_token = True

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return _Size(is_drafted=jnp.asarray(True), num_nodes=jnp.int32(0))

  def length(self, state, over):
    del over
    return jnp.where(state.is_drafted, np.iinfo(np.int32).max, 0)

  def passes(self, draft, state, over=False):
    """See `policy.Policy`; nodes come after their parents."""
    del over
    return jnp.arange(draft.tokens.size) < state.num_nodes

  def update(self, drafted, kept, state, over):
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

  All run one executable, that of an `Adaptive` drafter, and take turns.

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
  decoder = Decoder(model, sized, verify.tree)
  size = lambda drafted, n: _Size(is_drafted=drafted, num_nodes=n)
  sizes = {'plain': size(False, 0)} | {str(n): size(True, n) for n in ladder}
  start = decode.prefill(
    decoder,
    params,
    np.ones((batch, length), np.int32),
    np.full(batch, length),
    jax.random.key(0),
    max_new_tokens=1 + rounds * (drafter.depth + 1),
    sampling=sampling_lib.Sampling(temperature=0.0),
  )

  def of_size(size):
    state = jax.block_until_ready(_sized(start, size))
    return lambda count: decode.advance(
      decoder, params, state, max_rounds=np.int32(count)
    )

  return loops.in_turns(
    {name: functools.partial(of_size, size) for name, size in sizes.items()},
    count=rounds,
    repeats=repeats,
  )


def _sized(start, size):
  """Returns a copy of a state, which `advance` consumes, for such rounds."""
  state = jax.tree.map(jnp.copy, start)
  (of_rows,) = state.draft.policies
  draft = dataclasses.replace(
    state.draft, policies=(jax.tree.map(jnp.full_like, of_rows, size),)
  )
  return dataclasses.replace(state, draft=draft)
