"""What a round emits in each row, whether the row stops, and the records."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sampling as sampling_lib
from specsample import stopping
from specsample import types
from specsample.types import (
  Array,
  DecodeState,
  Draft,
  Origin,
  StopReason,
  Verdict,
)


@types.pytree
class Emission:
  """The tokens that one round emits in each row."""

  tokens: Array  # [B, P + 1] int32, P = K on a chain
  origin: Array  # [B, P + 1] int8
  count: Array  # [B] int32, how many of the tokens are emitted
  num_accepted: Array  # [B] int32, how many of the emitted ones are drafts
  done: Array  # [B] bool
  stop_reason: Array  # [B] int32
  sampling: sampling_lib.Sampling  # leaves [B], after the emitted tokens


def settings(state: DecodeState) -> sampling_lib.Sampling:
  """Returns the rows' settings; a constraint restarts with each new turn."""
  constraint = state.sampling.constraint
  if constraint is None:
    return state.sampling
  is_new = state.length == state.prompt_length
  constraint = jax.vmap(type(constraint).restarted)(constraint, is_new)
  return dataclasses.replace(state.sampling, constraint=constraint)


def tokens(draft: Draft, verdict: Verdict) -> Array:
  """Returns the kept drafts, then copies of the next token: [B, P + 1]."""
  num_kept, drafted = verdict.num_accepted[:, None], draft.tokens
  if draft.parents is not None and verdict.path is not None:
    drafted = jnp.take_along_axis(drafted, verdict.path - 1, axis=1)
  index = jnp.arange(drafted.shape[1] + 1)
  kept = jnp.pad(drafted, ((0, 0), (0, 1)))
  return jnp.where(index < num_kept, kept, verdict.next_token[:, None])


def emit(
  state: DecodeState,
  draft: Draft,
  verdict: Verdict,
  valid: Array,
  stop: stopping.Conditions,
) -> Emission:
  """Returns the kept drafts and the next token, cut where the row stops.

  `valid` [B, N + 1] says after which nodes the target has a distribution.
  """
  num_kept = verdict.num_accepted[:, None]
  emitted = tokens(draft, verdict)
  index = jnp.arange(emitted.shape[1])
  node, parents = num_kept, jnp.arange(draft.tokens.shape[1])
  if draft.parents is not None and verdict.path is not None:
    node, parents = jnp.max(verdict.path, axis=1)[:, None], draft.parents
  goes_on = jnp.any((parents == node) & (draft.tokens >= 0), axis=1)
  has_draft = jnp.any(draft.tokens >= 0, axis=1)
  last_origin = jnp.select(
    [goes_on, has_draft], [Origin.CORRECTION, Origin.BONUS], Origin.PLAIN
  )
  origin = jnp.where(index < num_kept, Origin.ACCEPTED, last_origin[:, None])

  # Without a distribution there is no token after the kept drafts.
  has_next = jnp.take_along_axis(valid, node, axis=1)
  count = (num_kept + has_next)[:, 0]

  reasons = stopping.reasons(state, emitted, stop)
  stops = (reasons > 0) & (index < count[:, None])
  stopped = jnp.any(stops, axis=1)
  first = jnp.argmax(stops, axis=1)
  count = jnp.where(stopped, first + 1, count)
  count = jnp.where(state.done, 0, count)

  is_new = index < count[:, None]
  sampling = jax.vmap(sampling_lib.after)(
    settings(state), jnp.where(is_new, emitted, -1)
  )

  reason = jnp.where(
    state.length + count >= state.limit, state.limit_reason, StopReason.RUNNING
  )
  without = jnp.full_like(reason, StopReason.INVALID_LOGITS)
  if sampling.constraint is not None:
    nothing = emitted[:, :0]
    allowed = jax.vmap(type(sampling.constraint).mask)(
      sampling.constraint, nothing
    )
    is_stuck = ~jnp.any(allowed, axis=-1)
    without = jnp.where(is_stuck, StopReason.NO_TOKEN_ALLOWED, without)
  reason = jnp.where(has_next[:, 0], reason, without)
  reason_there = jnp.take_along_axis(reasons, first[:, None], axis=1)[:, 0]
  reason = jnp.where(stopped, reason_there, reason)
  reason = jnp.where(state.done, state.stop_reason, reason)
  return Emission(
    tokens=emitted,
    origin=origin.astype(jnp.int8),
    count=count,
    num_accepted=jnp.minimum(verdict.num_accepted, count),
    # A cancelled row is done but has no stop reason.
    done=state.done | (reason != StopReason.RUNNING),
    stop_reason=reason.astype(jnp.int32),
    sampling=sampling,
  )


def append(buffer: Array, values: Array, length: Array, count: Array) -> Array:
  """Writes the first count [B] of values [B, n] at index length [B] onwards."""
  offsets = jnp.arange(values.shape[1])
  is_new = offsets < count[:, None]
  columns = jnp.where(is_new, length[:, None] + offsets, buffer.shape[1])
  write = lambda row, columns, values: row.at[columns].set(values, mode='drop')
  return jax.vmap(write)(buffer, columns, values)


def write(
  state: DecodeState,
  draft: Draft,
  emission: Emission,
  records: dict[str, Any],
) -> DecodeState:
  """Returns the state with what a round emitted, all but the caches."""
  add = lambda buffer, values: append(
    buffer, values, state.length, emission.count
  )
  rounds = jnp.broadcast_to(state.round[:, None], emission.tokens.shape)
  counts = state.counts
  if counts is not None:
    generated = count_tokens(counts.generated, emission.tokens, emission.count)
    counts = dataclasses.replace(counts, generated=generated)
  return dataclasses.replace(
    state,
    length=state.length + emission.count,
    done=emission.done,
    stop_reason=emission.stop_reason,
    round=state.round + ~state.done,
    tokens=add(state.tokens, emission.tokens),
    origin=add(state.origin, emission.origin),
    emit_round=add(state.emit_round, rounds),
    records=jax.tree.map(add, state.records, records),
    proposed=_tally(state.proposed, drafts.depth(draft), state.done),
    accepted=_tally(state.accepted, emission.num_accepted, state.done),
    sampling=emission.sampling,
    counts=counts,
  )


def _tally(histogram, index, done):
  one = jax.nn.one_hot(index, histogram.shape[1], dtype=histogram.dtype)
  return jnp.where(done[:, None], histogram, histogram + one)


def count_tokens(counts: Array, tokens: Array, length: Array) -> Array:
  """Adds the first length [B] of tokens [B, n] to their counts [B, V]."""
  is_token = jnp.arange(tokens.shape[1]) < length[:, None]
  add = jax.vmap(lambda row, tokens, weights: row.at[tokens].add(weights))
  return add(counts, tokens, is_token.astype(jnp.int32))
