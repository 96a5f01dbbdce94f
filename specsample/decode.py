"""Draft, verify, emit: the one compiled loop over decoding steps.

`generate` composes `prefill`, `advance` and `finish`; streaming, refilling and
online updates use the parts. The model, drafter, verifier and stop conditions
are static, so that each combination is one executable per bucket of prompts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sampling as sampling_lib
from specsample import streams
from specsample import types
from specsample.sampling import Sampling
from specsample.types import (
  Array,
  DecodeState,
  Draft,
  Drafter,
  Model,
  Origin,
  Output,
  Params,
  StopReason,
  TokenCounts,
  Verifier,
)

# Bounds the attention scores of a prefill: this many tokens against the cache.
_PREFILL_CHUNK = 128
_SMALLEST_BUCKET = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """What ends a row besides its length. The stop itself is emitted too."""

  eos_ids: tuple[int, ...] = ()
  # Token sequences; one that begins in the prompt does not count.
  sequences: tuple[tuple[int, ...], ...] = ()


def pad_prompts(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Pads token lists to a bucket: a power of two, at least 64.

  Returns:
    prompts [B, P] int32, padded with 0, and lengths [B] int32.

  Raises:
    ValueError: no prompt, or an empty one.
  """
  lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
  if not prompts or not lengths.all():
    raise ValueError(
      f'prompts have lengths {lengths.tolist()}: give at least one prompt, '
      'each of at least one token (a BOS token, say)'
    )
  bucket = max(_SMALLEST_BUCKET, 1 << int(lengths.max() - 1).bit_length())
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in zip(padded, prompts, strict=True):
    row[: len(prompt)] = prompt
  return padded, lengths


def generate(
  params: Params,
  prompts: Array,
  lengths: Array,
  key: Array,
  *,
  request_ids: Array | None = None,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: int,
  stop: Stop = Stop(),
  max_length: int | None = None,
) -> Output:
  """Continues a batch of prompts, distributed as the target alone.

  Args:
    params: {'target': ..., 'drafter': ...}; no 'drafter' where it has none.
    prompts: [B, P] int32, of which `pad_prompts` makes few shapes.
    lengths: [B] int32, tokens of each prompt, 1..P.
    key: a PRNG key; with request_ids [B] int32 (default 0..B-1) it fixes each
      row's tokens, whatever else is in the batch.
    model: the target. drafter, verify: how to speculate; with `NoDraft` this
      is autoregressive decoding.
    sampling: settings, one for all rows or one a row.
    max_new_tokens: at most so many tokens a row.
    stop: what else ends a row.
    max_length: room for so many tokens in the cache, prompt included; default
      P + max_new_tokens. A row that fills it, or the model's own limit, stops.

  Raises:
    ValueError: an argument out of range, before anything is compiled.
  """
  request = _check_request(
    prompts,
    lengths,
    key,
    request_ids,
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    stop=stop,
    max_length=max_length,
  )
  return _generate(
    params,
    request,
    model=model,
    drafter=drafter,
    verify=verify,
    stop=stop,
    max_new_tokens=max_new_tokens,
  )


def prefill(
  params: Params,
  prompts: Array,
  lengths: Array,
  key: Array,
  *,
  request_ids: Array | None = None,
  model: Model,
  drafter: Drafter,
  sampling: Sampling,
  max_new_tokens: int,
  max_length: int | None = None,
) -> DecodeState:
  """Takes the prompts in, chunk by chunk; arguments as `generate`'s.

  A row of a running batch is refilled by prefilling a batch of one with the
  same `max_length` and writing its leaves over that row's.
  """
  request = _check_request(
    prompts,
    lengths,
    key,
    request_ids,
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    stop=Stop(),
    max_length=max_length,
  )
  return _prefill_jit(params, request, model=model, drafter=drafter)


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify', 'stop'),
  donate_argnames=('state',),
)
def advance(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  stop: Stop,
  max_rounds: Array | int,
) -> DecodeState:
  """Runs up to `max_rounds` more rounds, until every row is done.

  The given state's buffers are donated: use the returned one.
  """
  body = functools.partial(
    _step, params, model=model, drafter=drafter, verify=verify, stop=stop
  )

  def cond(carry):
    state, rounds = carry
    return (rounds < max_rounds) & ~jnp.all(state.done)

  def next_round(carry):
    state, rounds = carry
    return body(state), rounds + 1

  state, _ = jax.lax.while_loop(
    cond, next_round, (state, jnp.zeros((), jnp.int32))
  )
  return state


@functools.partial(jax.jit, static_argnames=('max_new_tokens',))
def finish(state: DecodeState, *, max_new_tokens: int) -> Output:
  """The emitted tokens of each row, moved to the front: M = max_new_tokens."""
  lengths = state.length - state.prompt_length
  offsets = jnp.arange(max_new_tokens)
  columns = state.prompt_length[:, None] + offsets
  emitted = offsets < lengths[:, None]

  def emissions(buffer):
    values = jnp.take_along_axis(buffer, columns, axis=1, mode='clip')
    return jnp.where(emitted, values, 0)

  return Output(
    tokens=emissions(state.tokens),
    lengths=lengths,
    log_probs=emissions(state.log_probs),
    origin=emissions(state.origin),
    emit_round=emissions(state.emit_round),
    rounds=state.round,
    proposed=state.proposed,
    accepted=state.accepted,
    stop_reason=state.stop_reason,
  )


@types.pytree
class _Request:
  """Checked arguments of one batch, on the device."""

  tokens: Array  # [B, S] int32, S = capacity + K + 1
  prompt_length: Array  # [B] int32
  limit: Array  # [B] int32
  limit_reason: Array  # [B] int32
  key: Array  # []
  request_id: Array  # [B] int32
  sampling: Sampling  # leaves [B]
  # The longest prompt's padded width: no chunk starts behind it.
  width: int = types.static()


def _check_request(
  prompts,
  lengths,
  key,
  request_ids,
  *,
  model,
  drafter,
  sampling,
  max_new_tokens,
  stop,
  max_length,
) -> _Request:
  num_drafts = drafter.num_draft_tokens
  if num_drafts < 0:
    raise ValueError(
      f'num_draft_tokens is {num_drafts}: draft at least 0 tokens a round'
    )
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens is {max_new_tokens}: ask for at least 1')
  if drafter.vocab_size not in (None, model.vocab_size):
    raise ValueError(
      f'the target has {model.vocab_size} tokens and the drafter '
      f'{drafter.vocab_size}: draft with a model of the same vocabulary'
    )
  for sequence in (stop.eos_ids, *stop.sequences):
    _check_ids('a stop token', np.asarray(sequence, np.int32), model.vocab_size)
  if not all(stop.sequences):
    raise ValueError('a stop sequence is empty: it would match everywhere')
  if np.ndim(prompts) != 2 or np.shape(lengths) != np.shape(prompts)[:1]:
    raise ValueError(
      f'prompts have shape {np.shape(prompts)} and lengths {np.shape(lengths)}:'
      ' expected [B, P] and [B] (pad_prompts makes both)'
    )
  batch, width = np.shape(prompts)
  if request_ids is None:
    request_ids = np.arange(batch, dtype=np.int32)
  if np.shape(request_ids) != (batch,):
    raise ValueError(
      f'request_ids have shape {np.shape(request_ids)}: give one integer a '
      f'prompt, [{batch}]'
    )
  room = width + max_new_tokens if max_length is None else max_length
  capacity = min(room, model.max_length)
  traced = any(isinstance(x, jax.core.Tracer) for x in (prompts, lengths))
  xp = jnp if traced else np
  if not traced:
    prompts, lengths = jax.device_get((prompts, lengths))
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    _check_prompts(prompts, lengths, capacity, model)
  slots = capacity + num_drafts + 1
  kept = prompts[:, :slots].astype(np.int32)
  limit = lengths + max_new_tokens
  request = _Request(
    tokens=xp.pad(kept, ((0, 0), (0, slots - kept.shape[1]))),
    prompt_length=lengths.astype(np.int32),
    limit=xp.minimum(limit, capacity).astype(np.int32),
    limit_reason=xp.where(
      limit > capacity, StopReason.CACHE_FULL, StopReason.MAX_NEW_TOKENS
    ).astype(np.int32),
    key=key,
    request_id=request_ids,
    sampling=sampling_lib.per_row(sampling, batch, model.vocab_size),
    width=min(width, slots),
  )
  # An explicit transfer, so that none is left for the compiled part.
  return request if traced else jax.device_put(request)


def _check_prompts(prompts, lengths, capacity, model):
  batch, width = prompts.shape
  if prompts.dtype.kind not in 'iu':
    raise ValueError(
      f'prompts are {prompts.dtype}: give integer token ids, int32'
    )
  if batch == 0 or lengths.min() < 1:
    raise ValueError(
      f'prompt lengths are {lengths.tolist()}: a prompt needs at least one '
      'token (a BOS token, say)'
    )
  if lengths.max() > width:
    raise ValueError(
      f'a prompt length is {lengths.max()}, but prompts hold {width} tokens'
    )
  if lengths.max() >= capacity:
    raise ValueError(
      f'a prompt of {lengths.max()} tokens leaves no room in {capacity}: '
      f'shorten it or raise max_length (the model goes up to '
      f'{model.max_length})'
    )
  is_token = np.arange(width) < lengths[:, None]
  _check_ids('a prompt token', prompts[is_token], model.vocab_size)


def _check_ids(what, ids, vocab_size):
  outside = ids[(ids < 0) | (ids >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'{what} has id {outside[0]}, outside the vocabulary of {vocab_size}: '
      "was it made by another model's tokenizer?"
    )


@functools.partial(
  jax.jit,
  static_argnames=('model', 'drafter', 'verify', 'stop', 'max_new_tokens'),
)
def _generate(params, request, *, model, drafter, verify, stop, max_new_tokens):
  state = _prefill(params, request, model=model, drafter=drafter)
  state = advance(
    params,
    state,
    model=model,
    drafter=drafter,
    verify=verify,
    stop=stop,
    max_rounds=max_new_tokens,
  )
  return finish(state, max_new_tokens=max_new_tokens)


def _prefill(params, request, *, model, drafter):
  batch, slots = request.tokens.shape
  chunk = min(_PREFILL_CHUNK, request.width)
  # All but the last token, which stays pending.
  fed = request.prompt_length - 1
  # The last chunk may reach past the prompts.
  tokens = jnp.pad(request.tokens[:, : request.width], ((0, 0), (0, chunk)))

  def cond(carry):
    start, *_ = carry
    return start < jnp.max(fed)

  def next_chunk(carry):
    start, cache, draft = carry
    inputs = jax.lax.dynamic_slice(tokens, (0, start), (batch, chunk))
    output, cache = model.apply(
      params['target'], inputs, cache, features=drafter.feature_layers
    )
    end = start + chunk
    cache = model.commit(cache, jnp.minimum(fed, end))
    count = jnp.clip(fed - start, 0, chunk)
    draft = drafter.extend(params, inputs, count, output, draft)
    return end, cache, draft

  _, cache, draft = jax.lax.while_loop(
    cond,
    next_chunk,
    (
      jnp.zeros((), jnp.int32),
      model.init_cache(batch, slots),
      drafter.init(params, batch, slots),
    ),
  )
  counts = None
  if request.sampling.penalised:
    is_token = jnp.arange(slots) < request.prompt_length[:, None]
    generated = jnp.zeros((batch, model.vocab_size), jnp.int32)
    add = jax.vmap(lambda row, tokens, weights: row.at[tokens].add(weights))
    counts = TokenCounts(
      prompt=add(generated, request.tokens, is_token.astype(jnp.int32)),
      generated=generated,
    )
  row_keys = jax.vmap(streams.row_key, (None, 0))(
    request.key, request.request_id
  )
  per_row = lambda dtype: jnp.zeros(batch, dtype)
  per_token = lambda dtype: jnp.zeros((batch, slots), dtype)
  histogram = jnp.zeros((batch, drafter.num_draft_tokens + 1), jnp.int32)
  return DecodeState(
    key=row_keys,
    request_id=request.request_id,
    prompt_length=request.prompt_length,
    length=request.prompt_length,
    limit=request.limit,
    limit_reason=request.limit_reason,
    done=per_row(bool),
    stop_reason=per_row(jnp.int32),
    round=per_row(jnp.int32),
    tokens=request.tokens,
    log_probs=per_token(jnp.float32),
    origin=per_token(jnp.int8),
    emit_round=per_token(jnp.int32),
    proposed=histogram,
    accepted=histogram,
    sampling=request.sampling,
    counts=counts,
    cache=cache,
    draft=draft,
  )


_prefill_jit = jax.jit(_prefill, static_argnames=('model', 'drafter'))


def _step(params, state, *, model, drafter, verify, stop):
  """One round: propose, score, verify, emit up to K + 1 tokens a row."""
  num_drafts = drafter.num_draft_tokens
  round_keys = jax.vmap(streams.round_key)(state.key, state.round)

  def draw(probs, position):
    if verify.positional:
      keys = jax.vmap(streams.position_key)(state.key, position)
    else:
      keys = jax.vmap(streams.draft_key)(round_keys, position)
    return jax.vmap(sampling_lib.draw)(keys, probs)

  def warp(logits, drafted):
    return jax.vmap(sampling_lib.warp)(
      state.sampling, state.counts, logits, drafted
    )

  draft, draft_state = drafter.propose(
    params, draw, warp, state.tokens, state.length, state.draft
  )
  # A round emits one token more than it keeps drafts.
  draft = _shorten(draft, state.limit - state.length - 1)

  pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
  inputs = jnp.concatenate([pending, jnp.maximum(draft.tokens, 0)], axis=1)
  output, cache = model.apply(
    params['target'], inputs, state.cache, features=drafter.feature_layers
  )
  valid = jnp.isfinite(jnp.max(output.logits, axis=-1))  # [B, K + 1]
  draft = _shorten(draft, jnp.sum(jnp.cumprod(valid, axis=1), axis=1))

  # prefixes[:, i]: the drafts before node i, what its penalties count.
  before = jnp.tri(num_drafts + 1, num_drafts, -1, dtype=bool)
  prefixes = jnp.where(before, draft.tokens[:, None], -1)
  target_probs = jax.vmap(warp, in_axes=1, out_axes=1)(output.logits, prefixes)

  if verify.positional:
    positions = state.length[:, None] + jnp.arange(num_drafts + 1)
    keys = jax.vmap(jax.vmap(streams.position_key, (None, 0)))(
      state.key, positions
    )
  else:
    keys = round_keys
  verdict = jax.vmap(verify)(keys, draft, target_probs)

  emission = _emit(state, draft, verdict, valid, stop)
  tokens = _append(state.tokens, emission.tokens, state.length, emission.count)
  length = state.length + emission.count
  verdict = dataclasses.replace(verdict, num_accepted=emission.num_accepted)
  draft_state = drafter.update(
    params, tokens, length, output, verdict, draft_state
  )
  append = lambda buffer, values: _append(
    buffer, values, state.length, emission.count
  )
  active = (~state.done).astype(jnp.int32)
  num_drafted = jnp.sum(draft.tokens >= 0, axis=1)
  tally = lambda histogram, i: (
    histogram
    + (jax.nn.one_hot(i, num_drafts + 1, dtype=jnp.int32) * active[:, None])
  )
  rounds = jnp.broadcast_to(state.round[:, None], emission.tokens.shape)
  return dataclasses.replace(
    state,
    length=length,
    done=emission.done,
    stop_reason=emission.stop_reason,
    round=state.round + active,
    tokens=tokens,
    log_probs=append(
      state.log_probs, _log_probs(output.logits, emission.tokens)
    ),
    origin=append(state.origin, emission.origin),
    emit_round=append(state.emit_round, rounds),
    proposed=tally(state.proposed, num_drafted),
    accepted=tally(state.accepted, emission.num_accepted),
    counts=_count(state.counts, emission),
    cache=model.commit(cache, length - 1),
    draft=draft_state,
  )


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
  num_drafted = jnp.sum(draft.tokens >= 0, axis=1, keepdims=True)
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

  reasons = _stop_reasons(state, tokens, stop)
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


def _stop_reasons(state, tokens, stop) -> Array:
  """The StopReason [B, K + 1] that each emitted token would give, or 0."""
  eos_ids = jnp.asarray(stop.eos_ids, jnp.int32)
  is_eos = jnp.any(tokens[..., None] == eos_ids, axis=-1)
  longest = max([len(sequence) for sequence in stop.sequences], default=1)
  positions = state.length[:, None] + jnp.arange(1 - longest, 0)
  earlier = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0), axis=1)
  earlier = jnp.where(positions >= state.prompt_length[:, None], earlier, -1)
  recent = jnp.concatenate([earlier, tokens], axis=1)

  ends_sequence = jnp.zeros(tokens.shape, bool)
  for sequence in stop.sequences:
    matches = jnp.ones(tokens.shape, bool)
    for back, token in enumerate(reversed(sequence)):
      begin = longest - 1 - back
      matches &= recent[:, begin : begin + tokens.shape[1]] == token
    ends_sequence |= matches
  reason = jnp.where(ends_sequence, StopReason.SEQUENCE, StopReason.RUNNING)
  return jnp.where(is_eos, StopReason.EOS, reason)


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
  chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
  return chosen - jax.nn.logsumexp(logits, axis=-1)
