"""Times on the devices: a generation, the parts of a round, the memory.

Nothing is compiled inside a timed region.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specsample
from specsample import sharding
from specsample import step
from specsample.types import (
  ArrayLike,
  Drafter,
  DraftLaw,
  Model,
  Params,
  Verifier,
)

# Far above any cache, so that the copy is one of the memory.
_COPY_BYTES = 1 << 28


def seconds(function: Callable[..., Any], *args, **kwargs) -> tuple[Any, float]:
  """Calls the function; its result, ready, and the seconds that took."""
  start = time.perf_counter()
  result = jax.block_until_ready(function(*args, **kwargs))
  return result, time.perf_counter() - start


def copy_bandwidth(repeats: int = 5) -> float:
  """Bytes read and written a second by a large copy on one device.

  That is this process's first one, also under a mesh. The larger of a compiled
  copy there and, where it is the host's CPU, one of numpy's. Processes that
  share a machine measure at the same time, and share its bandwidth.
  """
  one = sharding.make_mesh(devices=jax.local_devices()[:1])
  is_mesh = not jax.sharding.get_mesh().empty
  with jax.set_mesh(one) if is_mesh else contextlib.nullcontext():
    return _copy_bandwidth(repeats)


def _copy_bandwidth(repeats):
  host = np.ones(_COPY_BYTES // 4, np.float32)
  source = jnp.asarray(host)
  # Donated, the second array is reused, as numpy's is: no fresh pages.
  fill = jax.jit(lambda old, x: x + 1, donate_argnums=0, keep_unused=True)
  target = fill(jnp.zeros_like(source), source)
  times = []
  for _ in range(repeats):
    target, elapsed = seconds(fill, target, source)
    times.append(elapsed)
  if jax.devices()[0].platform == 'cpu':
    buffer = np.empty_like(host)
    for _ in range(repeats + 1):
      _, elapsed = seconds(np.copyto, buffer, host)
      times.append(elapsed)
  return 2 * host.nbytes / min(times)


@dataclasses.dataclass(frozen=True)
class RoundTimes:
  """Milliseconds of a round and its parts."""

  draft_ms: float
  verify_ms: float  # the target's pass
  overhead_ms: float  # the rest, which noise can make negative
  least_ms: float  # of whole rounds, the fastest that was seen
  law: DraftLaw  # of the drafts


def round_times(
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: specsample.Sampling,
  max_new_tokens: int,
  rounds: int = 4,
  repeats: int = 25,
) -> RoundTimes:
  """Times drafting alone, the target over K + 1 tokens alone, a whole round.

  Each is a compiled loop of `rounds`; they take turns, `repeats` times. Parts
  are medians; the rest is that of the whole less the two parts just before it,
  when the machine was as fast or slow.
  """
  start = functools.partial(
    specsample.prefill,
    params,
    prompts,
    lengths,
    jax.random.key(0),
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )
  draft = functools.partial(
    _draft_rounds, params, drafter=drafter, verify=verify
  )
  score = functools.partial(
    _target_rounds, params, model=model, drafter=drafter
  )
  decode = functools.partial(
    specsample.advance,
    params,
    model=model,
    drafter=drafter,
    verify=verify,
    stop=specsample.Stop(),
  )
  times = []
  for repeat in range(repeats + 1):
    state = jax.block_until_ready(start())
    state, draft_time = seconds(draft, state, rounds=rounds)
    state, score_time = seconds(score, state, rounds=rounds)
    state, round_time = seconds(decode, state, max_rounds=rounds)
    if repeat:  # the first one compiles
      done = int(_most_rounds(state))
      times.append(
        (draft_time / rounds, score_time / rounds, round_time / done)
      )
  draft_ms, verify_ms, round_ms = 1e3 * np.asarray(times).T
  return RoundTimes(
    draft_ms=float(np.median(draft_ms)),
    verify_ms=float(np.median(verify_ms)),
    overhead_ms=float(np.median(round_ms - draft_ms - verify_ms)),
    least_ms=float(np.min(round_ms)),
    law=_law(params, state, drafter, verify),
  )


def pass_ms(
  params: Params,
  model: Model,
  sizes: Sequence[int],
  *,
  length: int,
  max_length: int,
  passes: int = 4,
  repeats: int = 25,
) -> dict[int, float]:
  """Milliseconds of one pass of the target over so many tokens, by size.

  They follow `length` tokens in a cache of `max_length`, of one row in each
  part of the mesh's data axis. Compiled loops of `passes`, the sizes in turns,
  the least of `repeats`.
  """
  times: dict[int, list[float]] = {size: [] for size in sizes}
  for repeat in range(repeats + 1):
    for size in sizes:
      _, elapsed = seconds(
        _passes,
        params,
        length,
        model=model,
        num_tokens=size,
        max_length=max_length + max(sizes),
        passes=passes,
      )
      if repeat:  # the first one compiles
        times[size].append(1e3 * elapsed / passes)
  return {size: min(elapsed) for size, elapsed in times.items()}


def _law(params, state, drafter, verify):
  """How the drafts come about; nothing is computed."""
  propose = functools.partial(step.propose, drafter=drafter, verify=verify)
  draft, _ = jax.eval_shape(propose, params, state)
  return draft.law


@jax.jit
def _most_rounds(state):
  return sharding.replicate(jnp.max(state.round))


@functools.partial(
  jax.jit, static_argnames=('drafter', 'verify'), donate_argnames=('state',)
)
def _draft_rounds(params, state, *, drafter, verify, rounds):
  def body(_, carry):
    length, draft_state = carry
    now = dataclasses.replace(state, length=length, draft=draft_state)
    draft, draft_state = step.propose(
      params, now, drafter=drafter, verify=verify
    )
    # Never true, but the next draft has to wait for this one to know.
    moved = jnp.any(draft.tokens < -1, axis=1)
    if draft.probs is not None:
      moved |= jnp.any(draft.probs < 0, axis=(1, 2))
    return length + moved, draft_state

  length, draft_state = jax.lax.fori_loop(
    0, rounds, body, (state.length, state.draft)
  )
  return dataclasses.replace(state, length=length, draft=draft_state)


@functools.partial(
  jax.jit, static_argnames=('model', 'drafter'), donate_argnames=('state',)
)
def _target_rounds(params, state, *, model, drafter, rounds):
  num_rows = drafter.num_draft_tokens + 1
  inputs = state.tokens[:, :num_rows]

  def body(_, carry):
    inputs, cache = carry
    output, cache = model.apply(
      params['target'], inputs, cache, features=drafter.feature_layers
    )
    # As above: all logits are needed before the next pass.
    moved = jnp.any(output.logits == jnp.inf, axis=(1, 2))
    return inputs + moved[:, None], model.commit(cache, state.length - 1)

  _, cache = jax.lax.fori_loop(0, rounds, body, (inputs, state.cache))
  return dataclasses.replace(state, cache=cache)


@functools.partial(
  jax.jit, static_argnames=('model', 'num_tokens', 'max_length')
)
def _passes(params, length, *, model, num_tokens, max_length, passes):
  rows = sharding.batch_parts()
  inputs = 1 + sharding.zeros((rows, num_tokens), jnp.int32, 'batch', None)
  length += sharding.zeros((rows,), jnp.int32, 'batch')

  def body(_, carry):
    inputs, cache = carry
    output, cache = model.apply(params['target'], inputs, cache)
    # Never true, but the next pass has to wait for all logits to know.
    moved = jnp.any(output.logits == jnp.inf, axis=(1, 2))
    return inputs + moved[:, None], model.commit(cache, length)

  cache = model.commit(model.init_cache(rows, max_length), length)
  return jax.lax.fori_loop(0, passes, body, (inputs, cache))[0]
