"""One round of decoding: propose, score, verify, emit.

Each step feeds the target [pending, d_1, ..., d_K], reads K + 1 distributions
and emits between one and K + 1 tokens a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sampling as sampling_lib
from specsample import sharding
from specsample import stopping
from specsample import streams
from specsample import types
from specsample.types import (
  Array,
  Cache,
  DecodeState,
  Draft,
  Drafter,
  DrafterState,
  Model,
  ModelOutput,
  Origin,
  Params,
  StopReason,
  Verdict,
  Verifier,
  Warp,
)


def step(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  stop: stopping.Stop,
) -> DecodeState:
  """One round: emits up to K + 1 tokens of each row that is not done."""
  draft, draft_state = propose(params, state, drafter=drafter, verify=verify)
  output, cache = score(params, state, draft, model=model, drafter=drafter)

  target_probs = _target_probs(state, draft, output.logits)
  valid = sampling_lib.is_distribution(target_probs)  # [B, K + 1]
  # A rule looks at all positions at once: of those without a distribution it
  # must see neither the draft nor a NaN.
  draft = _shorten(draft, _num_leading(valid))
  target_probs = jnp.where(valid[..., None], target_probs, 0)
  verdict = _judge(state, draft, target_probs, verify)
  emission = _emit(state, draft, verdict, valid, stop)

  append = lambda buffer, values: _append(
    buffer, values, state.length, emission.count
  )
  tokens = append(state.tokens, emission.tokens)
  length = state.length + emission.count
  verdict = dataclasses.replace(verdict, num_accepted=emission.num_accepted)
  draft_state = drafter.update(
    params, tokens, length, output, verdict, draft_state
  )
  rounds = jnp.broadcast_to(state.round[:, None], emission.tokens.shape)
  log_probs = _log_probs(output.logits, emission.tokens)
  return dataclasses.replace(
    state,
    length=length,
    done=emission.done,
    stop_reason=emission.stop_reason,
    round=state.round + ~state.done,
    tokens=tokens,
    log_probs=append(state.log_probs, log_probs),
    origin=append(state.origin, emission.origin),
    emit_round=append(state.emit_round, rounds),
    proposed=_tally(state.proposed, _num_drafted(draft), state.done),
    accepted=_tally(state.accepted, emission.num_accepted, state.done),
    counts=_count(state.counts, emission),
    cache=model.commit(cache, length - 1),
    draft=draft_state,
  )


def propose(
  params: Params, state: DecodeState, *, drafter: Drafter, verify: Verifier
) -> tuple[Draft, DrafterState]:
  """The round's draft [B, ...], no longer than what each row may emit."""
  round_keys = _round_keys(state)

  def draw(probs, position):
    if verify.positional:
      keys = jax.vmap(streams.position_key)(state.key, position)
      return jax.vmap(sampling_lib.draw_coupled)(keys, probs)
    keys = jax.vmap(streams.draft_key)(round_keys, position)
    return jax.vmap(sampling_lib.draw)(keys, probs)

  draft, draft_state = drafter.propose(
    params, draw, _warp(state), state.tokens, state.length, state.draft
  )
  # A round emits one token more than it keeps drafts.
  count = state.limit - state.length - 1
  if draft.probs is not None:
    valid = sampling_lib.is_distribution(draft.probs)
    count = jnp.minimum(count, _num_leading(valid))
  return _shorten(draft, count), draft_state


def score(
  params: Params,
  state: DecodeState,
  draft: Draft,
  *,
  model: Model,
  drafter: Drafter,
) -> tuple[ModelOutput, Cache]:
  """The target's pass over [pending, d_1, ..., d_K]."""
  pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
  inputs = jnp.concatenate([pending, jnp.maximum(draft.tokens, 0)], axis=1)
  return model.apply(
    params['target'], inputs, state.cache, features=drafter.feature_layers
  )


def _target_probs(state, draft, logits):
  """The distributions [B, K + 1, V] of logits after 0 to K drafts."""
  num_nodes = logits.shape[1]
  # prefixes[:, i]: the drafts before node i, what its penalties count.
  before = jnp.tri(num_nodes, num_nodes - 1, -1, dtype=bool)
  prefixes = jnp.where(before, draft.tokens[:, None], -1)
  return jax.vmap(_warp(state), in_axes=1, out_axes=1)(logits, prefixes)


def _judge(state, draft, target_probs, verify) -> Verdict:
  """The verdict [B] on the draft under target_probs [B, K + 1, V]."""
  keys = _round_keys(state)
  if verify.positional:
    positions = state.length[:, None] + jnp.arange(target_probs.shape[1])
    position_keys = jax.vmap(streams.position_key, (None, 0))
    keys = jax.vmap(position_keys)(state.key, positions)
  return jax.vmap(verify)(keys, draft, target_probs)


def _round_keys(state):
  return jax.vmap(streams.round_key)(state.key, state.round)


def _warp(state) -> Warp:
  return lambda logits, drafted: jax.vmap(sampling_lib.warp)(
    state.sampling, state.counts, logits, drafted
  )


def _num_leading(valid):
  """How many of each row's [B, n] flags are set before one is not."""
  return jnp.sum(jnp.cumprod(valid, axis=1), axis=1)


def _num_drafted(draft):
  return jnp.sum(draft.tokens >= 0, axis=1)


def _tally(histogram, index, done):
  one = jax.nn.one_hot(index, histogram.shape[1], dtype=histogram.dtype)
  return jnp.where(done[:, None], histogram, histogram + one)


def _shorten(draft: Draft, count: Array) -> Draft:
  """Keeps the first count [B] drafts of each row (Draft leaves [B, ...])."""
  keep = jnp.arange(draft.tokens.shape[1]) < count[:, None]
  probs = draft.probs
  if probs is not None:
    probs = jnp.where(keep[..., None], probs, 0)
  return dataclasses.replace(
    draft, tokens=jnp.where(keep, draft.tokens, -1), probs=probs
  )


@types.pytree
class _Emission:
  """What one round adds to each row."""

  tokens: Array  # [B, K + 1] int32
  origin: Array  # [B, K + 1] int8
  count: Array  # [B] int32, how many of them are emitted
  num_accepted: Array  # [B] int32, how many of those are drafts
  done: Array  # [B] bool
  stop_reason: Array  # [B] int32


def _emit(state, draft, verdict, valid, stop) -> _Emission:
  """The kept drafts and the next token, cut where the row stops."""
  num_kept = verdict.num_accepted[:, None]
  num_drafted = _num_drafted(draft)[:, None]
  index = jnp.arange(draft.tokens.shape[1] + 1)
  tokens = jnp.where(
    index < num_kept,
    jnp.pad(draft.tokens, ((0, 0), (0, 1))),
    verdict.next_token[:, None],
  )
  last_origin = jnp.where(
    num_kept == num_drafted, Origin.BONUS, Origin.CORRECTION
  )
  origin = jnp.where(index < num_kept, Origin.ACCEPTED, last_origin)

  # Without a distribution there is no token after the kept drafts.
  has_next = jnp.take_along_axis(valid, num_kept, axis=1)
  count = (num_kept + has_next)[:, 0]

  reasons = stopping.reasons(state, tokens, stop)
  stops = (reasons > 0) & (index < count[:, None])
  stopped = jnp.any(stops, axis=1)
  first = jnp.argmax(stops, axis=1)
  count = jnp.where(stopped, first + 1, count)
  count = jnp.where(state.done, 0, count)

  reason = jnp.where(
    state.length + count >= state.limit, state.limit_reason, StopReason.RUNNING
  )
  reason = jnp.where(has_next[:, 0], reason, StopReason.INVALID_LOGITS)
  reason_there = jnp.take_along_axis(reasons, first[:, None], axis=1)[:, 0]
  reason = jnp.where(stopped, reason_there, reason)
  reason = jnp.where(state.done, state.stop_reason, reason)
  return _Emission(
    tokens=tokens,
    origin=origin.astype(jnp.int8),
    count=count,
    num_accepted=jnp.minimum(verdict.num_accepted, count),
    done=reason != StopReason.RUNNING,
    stop_reason=reason.astype(jnp.int32),
  )


def _append(buffer, values, length, count):
  """Writes the first count [B] of values [B, n] behind length [B]."""
  offsets = jnp.arange(values.shape[1])
  is_new = offsets < count[:, None]
  columns = jnp.where(is_new, length[:, None] + offsets, buffer.shape[1])
  write = lambda row, columns, values: row.at[columns].set(values, mode='drop')
  return jax.vmap(write)(buffer, columns, values)


def _count(counts, emission):
  if counts is None:
    return None
  is_new = jnp.arange(emission.tokens.shape[1]) < emission.count[:, None]
  add = jax.vmap(lambda row, tokens, weights: row.at[tokens].add(weights))
  generated = add(counts.generated, emission.tokens, is_new.astype(jnp.int32))
  return dataclasses.replace(counts, generated=generated)


def _log_probs(logits, tokens):
  """The log-probability [B, n] of tokens [B, n] under logits [B, n, V]."""
  logits = logits.astype(jnp.float32)
  chosen = sharding.pick(logits, tokens)
  return chosen - jax.nn.logsumexp(logits, axis=-1)
