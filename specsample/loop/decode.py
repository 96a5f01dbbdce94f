"""Draft and verify until done: the one compiled loop over decoding steps.

`generate` is `prefill`, `advance` and `finish`, each compiled for itself (one
program took 100 MB more memory to compile); streaming, refilling and online
updates use the parts. The model, drafter, verifier and stop conditions are
static, so that each combination is one executable per bucket of prompts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample.loop import initial
from specsample.loop import request as request_lib
from specsample.loop import step
from specsample.loop.stopping import Stop
from specsample.sampling import Sampling
from specsample.types import (
  Array,
  ArrayLike,
  DecodeState,
  Drafter,
  Model,
  Output,
  Params,
  Verifier,
)

# Models, drafters and rules that `check_rule` let pass: tracing takes a while,
# and even to find a trace in JAX's own cache 2 ms of every call.
_FITTING: set[tuple[Model, Drafter, Verifier]] = set()


def generate(
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  key: Array,
  *,
  request_ids: ArrayLike | None = None,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  stop: Stop = Stop(),
  max_length: int | None = None,
) -> Output:
  """Continues a batch of prompts, distributed as the target alone.

  (So with every lossless `verify`; `Typical`, `Lenient` and `Synthetic` are
  not.)

  Args:
    params: {'target': ..., 'drafter': ...}; no 'drafter' where it has none.
    prompts: [B, P] int32, of which `pad_prompts` makes few shapes.
    lengths: [B] int32, tokens of each prompt, 1..P.
    key: a PRNG key; with request_ids [B] int32 (default 0..B-1) it fixes each
      row's tokens, whatever else is in the batch.
    model: the target. drafter, verify: how to speculate; with `NoDraft` this
      is autoregressive decoding.
    sampling: settings, one for all rows or one a row.
    max_new_tokens: at most so many tokens a row: one number, or one a row [B];
      of several M is the largest.
    stop: what else ends a row.
    max_length: room for so many tokens in the cache, prompt included; default
      P + max_new_tokens. A row that fills it, or the model's own limit, stops.

  Returns:
    The emitted tokens and what is known of each, on the device.

  Raises:
    ValueError: an argument out of range, before anything is compiled.
  """
  stop.check(model.vocab_size)
  state = prefill(
    params,
    prompts,
    lengths,
    key,
    request_ids=request_ids,
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
    verify=verify,
  )
  state = advance(
    params,
    state,
    model=model,
    drafter=drafter,
    verify=verify,
    stop=stop,
    # Never so many, each emits a token; an explicit transfer, as the request's.
    max_rounds=jax.device_put(np.int32(state.tokens.shape[1])),
  )
  batch = np.shape(prompts)[0]
  most = most_new_tokens(state, max_new_tokens)
  return finish(state, max_new_tokens=most, batch_size=batch)


def most_new_tokens(state: DecodeState, max_new_tokens: ArrayLike | int) -> int:
  """M, for `finish`: the most of `generate`'s, or as many as there is room for.

  Args:
    state: of the rows.
    max_new_tokens: one number, or one a row.
  """
  return min(int(np.max(max_new_tokens)), state.tokens.shape[1])


def prefill(
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  key: Array,
  *,
  request_ids: ArrayLike | None = None,
  model: Model,
  drafter: Drafter,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  max_length: int | None = None,
  slots: int | None = None,
  verify: Verifier | None = None,
) -> DecodeState:
  """Takes the prompts in, chunk by chunk; arguments as `generate`'s.

  A row of a running batch is refilled by prefilling a batch of one with the
  same `max_length` (given, not the default) and writing its leaves over that
  row's, as `refill` does.

  `slots` makes the buffers smaller than `max_length` needs: they must hold the
  prompts in whole chunks, and the caller enlarges them before a row fills them,
  as `refill` does.

  `verify` is only checked, not run: a rule that `advance` would refuse is
  refused here, before anything is compiled. None is not checked.
  """
  request = request_lib.check(
    params,
    prompts,
    lengths,
    key,
    request_ids,
    model=model,
    drafter=drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
    slots=slots,
  )
  if verify is not None:
    check_rule(params, request, model=model, drafter=drafter, verify=verify)
  return _prefill(params, request, model=model, drafter=drafter)


def check_rule(
  params: Params,
  request: request_lib.Request,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
) -> None:
  """Refuses a rule that does not take the drafter's drafts.

  What drafts are like they say themselves, so one is traced, once for each
  model, drafter and rule; nothing is compiled.

  Args:
    params, model, drafter, verify: as `generate`'s.
    request: of `request.check`.

  Raises:
    ValueError: names both, and the law or the form that does not fit.
  """
  fitting = model, drafter, verify
  if fitting in _FITTING:
    return
  jax.eval_shape(
    functools.partial(
      _first_verdict, model=model, drafter=drafter, verify=verify
    ),
    params,
    request,
  )
  _FITTING.add(fitting)


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
  stop: Stop = Stop(),
  max_rounds: Array | int,
  max_finished: Array | int | None = None,
) -> DecodeState:
  """Runs up to `max_rounds` more rounds, until every row is done.

  Args:
    params: as `generate`'s.
    state: from `prefill`. Its buffers are donated: use the returned one.
    model, drafter: as in `prefill`. verify, stop: as `generate`'s.
    max_rounds: int32; may differ from call to call without a new executable.
    max_finished: int32; returns as soon as so many more rows are done, so that
      they can be refilled. None waits for all.

  Raises:
    ValueError: the drafter proposes another number of tokens than the one of
      `prefill`, which left room for its own; a stop token that does not exist.
  """
  stop.check(model.vocab_size)
  own = drafter.num_draft_tokens, initial.depth(drafter)
  known = state.num_draft_tokens, state.proposed.shape[1] - 1
  if own != known:
    raise ValueError(
      f'the drafter proposes {own[0]} tokens a round, {own[1]} deep, but the '
      f'state was made for {known[0]}, {known[1]} deep: prefill with this '
      'drafter'
    )
  body = functools.partial(
    step.step, params, model=model, drafter=drafter, verify=verify, stop=stop
  )

  enough: Array | int = state.done.size
  if max_finished is not None:
    enough = jnp.minimum(enough, jnp.sum(state.done) + max_finished)

  def cond(carry):
    state, rounds = carry
    return (rounds < max_rounds) & (jnp.sum(state.done) < enough)

  def next_round(carry):
    state, rounds = carry
    return body(state), rounds + 1

  state, _ = jax.lax.while_loop(
    cond, next_round, (state, jnp.zeros((), jnp.int32))
  )
  return state


@functools.partial(jax.jit, static_argnames=('max_new_tokens', 'batch_size'))
def finish(
  state: DecodeState, *, max_new_tokens: int, batch_size: int | None = None
) -> Output:
  """The emitted tokens of each row, moved to the front.

  Whole on every device of a mesh, so that every host can read them.

  Args:
    state: as `advance` returned it.
    max_new_tokens: M, at most so many a row: the first, where it has more.
    batch_size: only the first so many rows; default all, those included that
      fill up a batch which the mesh does not divide evenly.
  """
  lengths = jnp.minimum(state.length - state.prompt_length, max_new_tokens)
  offsets = jnp.arange(max_new_tokens)
  columns = state.prompt_length[:, None] + offsets
  emitted = offsets < lengths[:, None]

  def emissions(buffer):
    values = jnp.take_along_axis(buffer, columns, axis=1, mode='clip')
    return jnp.where(emitted, values, 0)

  output = Output(
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
  return jax.tree.map(lambda x: x[:batch_size], sharding.replicate(output))


def _first_verdict(params, request, *, model, drafter, verify):
  """Over a draft behind nothing, never run: what matters is that it fits."""
  state = initial.state(params, request, model=model, drafter=drafter)
  draft, _ = step.propose(
    params, state, model=model, drafter=drafter, verify=verify
  )
  batch, num_drafts = draft.tokens.shape
  target_probs = sharding.zeros(
    (batch, num_drafts + 1, model.vocab_size),
    jnp.float32,
    *('batch', None, sharding.Axis('vocab', model.vocab_size)),
  )
  try:
    return step.judge(state, draft, target_probs, verify)
  except ValueError as error:
    raise ValueError(f'drafts of {type(drafter).__name__}: {error}') from error


@functools.partial(jax.jit, static_argnames=('model', 'drafter'))
def _prefill(params, request, *, model, drafter):
  state = initial.state(params, request, model=model, drafter=drafter)
  batch, chunk = request.tokens.shape[0], request.chunk
  # All but the last token, which stays pending.
  fed = request.prompt_length - 1

  def cond(carry):
    start, *_ = carry
    return start < jnp.max(fed)

  def next_chunk(carry):
    start, cache, draft = carry
    inputs = jax.lax.dynamic_slice(request.tokens, (0, start), (batch, chunk))
    output, cache = model.apply(
      params['target'], inputs, cache, features=drafter.feature_layers
    )
    end = start + chunk
    cache = model.commit(cache, jnp.minimum(fed, end))
    count = jnp.clip(fed - start, 0, chunk)
    draft = drafter.extend(params, inputs, count, output, draft)
    return end, cache, draft

  _, cache, draft = jax.lax.while_loop(
    cond, next_chunk, (jnp.zeros((), jnp.int32), state.cache, state.draft)
  )
  return dataclasses.replace(state, cache=cache, draft=draft)
