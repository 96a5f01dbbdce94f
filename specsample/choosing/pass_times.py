"""Times of the target's passes and of drafting on the devices at hand."""

from collections.abc import Sequence
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import sharding
from specsample import verify
from specsample.loop import initial
from specsample.loop import request
from specsample.loop import step
from specsample.types import Drafter, Model, Params


def passes(
  params: Params,
  model: Model,
  sizes: Sequence[int],
  *,
  length: int,
  max_length: int,
  batch: int | None = None,
  times: int = 4,
  repeats: int = 25,
) -> dict[int, list[float]]:
  """Times passes of the target over several numbers of tokens per row.

  The sizes take turns, so that a slowdown of the machine affects all of them.

  Args:
    params: {'target': ...}.
    model: the target.
    sizes: numbers of tokens per row.
    length: tokens of each row that are already in the cache.
    max_length: slots of the cache, not counting those for the largest size.
    batch: number of rows; None for one in each part of the mesh's data axis.
    times: passes in a compiled loop; the time of an empty loop is subtracted.
    repeats: how often each loop is timed.

  Returns:
    The seconds per pass, [repeats] for each size.
  """
  rows = sharding.batch_parts() if batch is None else batch
  taken: dict[int, list[float]] = {size: [] for size in sizes}
  of_calls: dict[int, list[float]] = {size: [] for size in sizes}
  for repeat in range(repeats + 1):
    for size in sizes:
      for count, found in ((0, of_calls[size]), (times, taken[size])):
        begin = time.perf_counter()
        jax.block_until_ready(
          _passes(
            params,
            length,
            model=model,
            rows=rows,
            num_tokens=size,
            max_length=max_length + max(sizes),
            times=count,
          )
        )
        if repeat:  # the first one compiles
          found.append(time.perf_counter() - begin)
  return {
    size: [(x - min(of_calls[size])) / times for x in found]
    for size, found in taken.items()
  }


def drafting(
  params: Params,
  model: Model,
  drafter: Drafter,
  *,
  length: int,
  batch: int = 1,
  times: int = 4,
  repeats: int = 9,
) -> list[float]:
  """Times a draft of all K tokens for each of `batch` rows.

  Args:
    params: {'target': ..., 'drafter': ...}.
    model: the target.
    drafter: drafts for the target.
    length: tokens of each row before the draft.
    batch: number of rows.
    times: drafts in a compiled loop; the time of an empty loop is subtracted.
    repeats: how often the loop is timed.

  Returns:
    The seconds per draft, [repeats].
  """
  prompts = np.ones((batch, length), np.int32)
  checked = request.check(
    params=params,
    prompts=prompts,
    lengths=np.full(batch, length),
    key=jax.random.key(0),
    request_ids=None,
    model=model,
    drafter=drafter,
    sampling=sampling_lib.Sampling(),
    max_new_tokens=1 + drafter.num_draft_tokens,
    max_length=None,
  )
  state = initial.state(params, checked, model=model, drafter=drafter)
  taken: dict[int, list[float]] = {0: [], times: []}
  for repeat in range(repeats + 1):
    for count, found in taken.items():
      begin = time.perf_counter()
      jax.block_until_ready(
        _drafts(params, state, model=model, drafter=drafter, times=count)
      )
      if repeat:
        found.append(time.perf_counter() - begin)
  return [(x - min(taken[0])) / times for x in taken[times]]


@functools.partial(
  jax.jit, static_argnames=('model', 'rows', 'num_tokens', 'max_length')
)
def _passes(params, length, *, model, rows, num_tokens, max_length, times):
  inputs = 1 + sharding.zeros((rows, num_tokens), jnp.int32, 'batch', None)
  length += sharding.zeros((rows,), jnp.int32, 'batch')

  def body(_, carry):
    inputs, cache = carry
    output, cache = model.apply(params['target'], inputs, cache)
    # Never true, but makes the next pass depend on all logits.
    moved = jnp.any(output.logits == jnp.inf, axis=(1, 2))
    return inputs + moved[:, None], model.commit(cache, length)

  cache = model.commit(model.init_cache(rows, max_length), length)
  return jax.lax.fori_loop(0, times, body, (inputs, cache))[0]


@functools.partial(jax.jit, static_argnames=('model', 'drafter'))
def _drafts(params, state, *, model, drafter, times):
  def body(_, state):
    draft, own = step.propose(
      params, state, model=model, drafter=drafter, verify=verify.chain
    )
    # Never true, but makes the next draft depend on this one.
    moved = jnp.any(draft.tokens < -1, axis=-1)
    return dataclasses.replace(
      state, tokens=state.tokens + moved[:, None], draft=own
    )

  return jax.lax.fori_loop(0, times, body, state).tokens
