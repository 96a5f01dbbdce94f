"""The compiled loops that are timed as parts of a round, and their timing.

Every turn of a loop must do all the work of a round. The compiler must not drop
a computation because nothing reads its result, nor move it out of the loop
because its inputs do not change.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sharding
from specsample.loop import certified
from specsample.loop import judging
from specsample.loop import passes as passes_lib
from specsample.loop import step
from specsample.types import Array, ByChoice, Draft, DraftKind


def in_turns(
  loops: Mapping[Any, Callable[[], Callable[[int], Any]]],
  *,
  count: int,
  repeats: int,
) -> dict[Any, list[float]]:
  """Times loops that take turns, so that a slowdown affects all of them.

  Args:
    loops: by name, what makes a loop ready, untimed. A loop takes how often its
      body is to run.
    count: how often the body runs; the least time of a call that does not run
      it is subtracted.
    repeats: how often each loop is timed, after a first time that compiles.

  Returns:
    The seconds per run of the body, [repeats] for each loop.
  """
  calls: dict[Any, list[float]] = {name: [] for name in loops}
  taken: dict[Any, list[float]] = {name: [] for name in loops}
  for repeat in range(repeats + 1):
    for name, ready in loops.items():
      for times, found in ((0, calls[name]), (count, taken[name])):
        loop = ready()
        begin = time.perf_counter()
        jax.block_until_ready(loop(times))
        if repeat:
          found.append(time.perf_counter() - begin)
  return {
    name: [(x - min(calls[name])) / count for x in found]
    for name, found in taken.items()
  }


@functools.partial(
  jax.jit, static_argnames=('model', 'rows', 'num_tokens', 'max_length')
)
def passes(params, length, *, model, rows, num_tokens, max_length, times):
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


@functools.partial(jax.jit, static_argnames='decoder')
def drafted_alone(decoder, params, state, times):
  def body(_, state):
    draft, own = step.propose(decoder, params, state)
    # Never true, but makes the next draft depend on this one.
    moved = jnp.any(draft.tokens < -1, axis=-1)
    return dataclasses.replace(
      state, tokens=state.tokens + moved[:, None], draft=own
    )

  return jax.lax.fori_loop(0, times, body, state).tokens


@functools.partial(jax.jit, static_argnames=('width',))
def of_width(draft, *, width) -> Draft:
  """Returns a draft of the same shape with exactly its first `width` nodes."""
  is_there = jnp.arange(draft.tokens.shape[1]) < width
  tokens = jnp.where(is_there, jnp.maximum(draft.tokens, 0), -1)
  return dataclasses.replace(draft, tokens=tokens)


@jax.jit
def most_drafts(draft):
  """Returns the most drafts of any row, counted as in `drafts.width`."""
  return sharding.replicate(jnp.max(drafts.width(draft)))


@jax.jit
def most_rounds(state):
  """Returns the most rounds of any row; all rows take them in one loop."""
  return sharding.replicate(jnp.max(state.round))


@jax.jit
def num_by_drafts(state):
  """Counts the rounds of all rows that had 0, 1, ... drafts, [K + 1]."""
  return sharding.replicate(jnp.sum(state.proposed, axis=0))


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def drafted_rounds(decoder, params, state, rounds):
  """Drafts and runs the target; returns the state and the last draft.

  The draft is without probabilities and signals (see `_shape`).
  """
  abstract = step.abstract_draft(decoder, params, state)
  rows = lambda x: sharding.zeros(x.shape, x.dtype, 'batch', None)
  nothing = jax.tree.map(rows, _shape(abstract))
  path = _root(state, abstract)

  def body(_, carry):
    length, cache, draft_state, _ = carry
    # Heads read what no round here changes. Without the barrier they would
    # draft only once, before the loop.
    length, draft_state = jax.lax.optimization_barrier((length, draft_state))
    now = dataclasses.replace(
      state, length=length, cache=cache, draft=draft_state
    )
    draft, draft_state = step.propose(decoder, params, now)
    cache, moved = _scored(decoder, params, now, draft, path)
    # The next round must also wait for the distributions of this draft.
    if draft.probs is not None:
      moved |= jnp.any(draft.probs < 0, axis=(1, 2))
    return length + moved, cache, draft_state, _shape(draft)

  length, cache, draft_state, draft = jax.lax.fori_loop(
    0, rounds, body, (state.length, state.cache, state.draft, nothing)
  )
  state = dataclasses.replace(
    state, length=length, cache=cache, draft=draft_state
  )
  return state, draft


def _shape(draft: Draft) -> Draft:
  """Returns a draft without its probabilities and without its signals."""
  return dataclasses.replace(
    draft, probs=None, kind=DraftKind.POINT_MASS, signals=None
  )


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def target_rounds(decoder, params, state, draft, rounds):
  """Runs passes of the target over a draft; returns the state."""
  path = _root(state, draft)

  def body(_, carry):
    length, cache = carry
    now = dataclasses.replace(state, length=length, cache=cache)
    cache, moved = _scored(decoder, params, now, draft, path)
    return length + moved, cache

  length, cache = jax.lax.fori_loop(
    0, rounds, body, (state.length, state.cache)
  )
  return dataclasses.replace(state, length=length, cache=cache)


def _root(state, draft) -> Array | None:
  """Returns a path that stays at the root, as `step.score` takes it."""
  if draft.parents is None:
    return None
  batch = state.length.shape[0]
  return sharding.zeros((batch, draft.depth + 1), jnp.int32, 'batch', None)


def _scored(decoder, params, now, draft, path):
  """Returns the cache after a pass, and flags [B] that the next one waits for.

  The flags are never true, but that is known only once all logits are computed,
  or the choices of a rule that needs no more. This also matters for a pass
  without drafts, whose unembedding would be left out if nothing depended on it.
  """
  output, cache = passes_lib.score(decoder, params, now, draft, path)
  if isinstance(decoder.verify, ByChoice):
    tokens, *_ = certified.choose(decoder, params, now, draft, output.hidden)
    moved = jnp.any(tokens < 0, axis=1)
  else:
    moved = jnp.any(output.logits == jnp.inf, axis=(1, 2))
  # No token is kept.
  return passes_lib.commit(decoder, cache, now.length - 1, 0, path), moved


@functools.partial(jax.jit, static_argnames=('decoder', 'width'))
def to_judge(decoder, params, state, draft, *, width):
  """Returns what a rule decides over: a draft and uniform distributions.

  As after a pass over `width` drafts, a chain is cut to `width` tokens; a tree
  has all its nodes.
  """
  vocab_size = decoder.model.vocab_size
  abstract = step.abstract_draft(decoder, params, state)
  batch, num_drafts = draft.tokens.shape
  probs = sharding.zeros(
    (batch, num_drafts + 1, vocab_size),
    jnp.float32,
    'batch',
    None,
    sharding.Axis('vocab', vocab_size),
  )
  probs += 1 / vocab_size
  own = None if abstract.probs is None else probs[:, 1:]
  draft = dataclasses.replace(draft, probs=own, kind=abstract.kind)
  if draft.parents is None:
    return drafts.first(draft, width), probs[:, : width + 1]
  return draft, probs


@functools.partial(jax.jit, static_argnames=('verify',))
def judged_rounds(state, draft, target_probs, *, verify, rounds):
  """Runs a rule on the output of `to_judge`; the result means nothing."""

  def body(_, carry):
    # The barrier keeps the rule inside the loop; outside, it would run once.
    carry, drafted, probs = jax.lax.optimization_barrier(
      (carry, draft, target_probs)
    )
    length, round_ = carry
    now = dataclasses.replace(state, length=length, round=round_)
    verdict = judging.judge(now, drafted, probs, verify)
    # Never true, as in `_scored`.
    moved = (verdict.num_accepted < 0) | (verdict.next_token < 0)
    if verdict.path is not None:
      moved |= jnp.any(verdict.path < -1, axis=1)
    return length + moved, round_ + moved

  return jax.lax.fori_loop(0, rounds, body, (state.length, state.round))
