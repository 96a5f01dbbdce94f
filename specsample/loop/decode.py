"""The compiled decoding loop: drafts and verifies until every row is done.

`generate` runs `prefill`, `advance` and `finish`. Each of them is compiled on
its own, because one program for all three took 100 MB more memory to compile.
Streaming, refilling and online updates call the three functions directly. The
model, drafter and verifier are static arguments, so there is one executable for
each combination of them and each size of the buffers, whatever the stop
conditions. Only the last step of `finish`, a cut, has one for each M. Equal
`max_length` gives buffers of equal size, whatever M.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import sharding
from specsample import stopping
from specsample.drafter import Drafter
from specsample.loop import initial
from specsample.loop import judging
from specsample.loop import request as request_lib
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import (
  Array,
  ArrayLike,
  DecodeState,
  Model,
  Output,
  Params,
  Verifier,
)

# Combinations that have passed `check_rule`, with the shapes of all parameters.
# Tracing takes a while, and even a hit in JAX's own trace cache would cost 2 ms
# per call.
_FITTING: set[tuple] = set()
# An output is made with a power of two of columns, at least this many.
_LEAST_COLUMNS = 64


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
  log_probs: bool = True,
) -> Output:
  """Continues a batch of prompts by speculative decoding.

  If `verify` is lossless, the output has exactly the target model's
  distribution. `Candidates`, `Typical`, `Lenient` and `Synthetic` are lossy.

  It may be called inside `jax.jit`, `jax.vmap` (over keys, say), `jax.lax.scan`
  or a function that is differentiated, as long as `max_new_tokens` and
  `max_length` are not traced. JAX hides the values of traced arguments, so only
  their shapes and dtypes are checked: not whether token ids are in the
  vocabulary, lengths are from 1 to P and leave room in the cache, request ids
  are below 2**31, and sampling settings are in their ranges. The output has no
  derivatives in reverse mode.

  Args:
    params: {'target': ..., 'drafter': ...}. Leave out 'drafter' if the drafter
      has no parameters.
    prompts: [B, P] int32; use `pad_prompts` to limit the number of shapes.
    lengths: [B] int32, number of tokens in each prompt, 1 to P.
    key: a PRNG key.
    request_ids: [B] int32, default 0..B-1. Together with the key they determine
      each row's tokens, whatever else is in the batch.
    model: the target model.
    drafter: proposes the draft tokens; `NoDraft` gives autoregressive decoding.
    verify: the verification rule.
    sampling: sampling settings, shared by all rows or one value per row.
    max_new_tokens: the most tokens to emit per row: one number, or one per row
      [B]. M is the largest of them.
    stop: further stop conditions.
    max_length: capacity of each row's cache in tokens, prompt included; default
      P + max_new_tokens. A row that reaches it, or the model's own limit,
      stops.
    log_probs: whether `Output.log_probs` and `warped_log_probs` are computed,
      which reads all logits.

  Returns:
    The emitted tokens and what is recorded about each of them, on the device.

  Raises:
    ValueError: an argument is out of range; nothing has been compiled yet.
  """
  decoder = Decoder(model, drafter, verify)
  conditions = stopping.placed(stop, model)
  state = prefill(
    decoder,
    params,
    prompts,
    lengths,
    key,
    request_ids=request_ids,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
    log_probs=log_probs,
  )
  run = _advance_and_keep if sharding.is_traced() else _advance
  # Upper bounds: every round emits at least one token. The transfer to the
  # device is explicit, like the request's.
  num_rows, num_slots = state.tokens.shape
  limits = jax.device_put((np.int32(num_slots), np.int32(num_rows)))
  state = run(decoder, params, state, conditions, *limits)
  batch_size = np.shape(prompts)[0]
  return finish(state, max_new_tokens=max_new_tokens, batch_size=batch_size)


def prefill(
  decoder: Decoder,
  params: Params,
  prompts: ArrayLike,
  lengths: ArrayLike,
  key: Array,
  *,
  request_ids: ArrayLike | None = None,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  max_length: int | None = None,
  log_probs: bool = True,
) -> DecodeState:
  """Prefills the prompts chunk by chunk; takes the arguments of `generate`.

  To refill a row of a running batch, prefill a batch of one with the same
  `max_length` (given explicitly, not the default) and write its leaves over
  that row's, as `refill` does.

  Raises:
    ValueError: as in `generate`; nothing has been compiled yet.
  """
  request = request_lib.check(
    decoder,
    params,
    prompts,
    lengths,
    key,
    request_ids=request_ids,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
    log_probs=log_probs,
  )
  check_rule(decoder, params, request)
  return _prefill(decoder, params, request)


def check_rule(
  decoder: Decoder, params: Params, request: request_lib.Request
) -> None:
  """Raises ValueError if the rule cannot verify the drafter's drafts.

  Only a draft itself says which kind and form it has, so this traces a draft
  and its verdict, once for each decoder and shapes of parameters. Nothing is
  compiled. The message names the drafter and the rule, and the kind or the form
  that does not fit.
  """
  leaves, structure = jax.tree.flatten(params)
  fitting = decoder, structure, tuple(map(np.shape, leaves))
  if fitting in _FITTING:
    return
  first_verdict = functools.partial(_first_verdict, decoder)
  jax.eval_shape(first_verdict, params, request)
  _FITTING.add(fitting)


def advance(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  *,
  stop: Stop = Stop(),
  max_rounds: ArrayLike | np.integer | int | None = None,
  max_finished: ArrayLike | np.integer | int | None = None,
) -> DecodeState:
  """Runs rounds until every row is done, at most `max_rounds` of them.

  Args:
    decoder, params: as in `prefill`.
    state: from `prefill` or `advance`. Its buffers are donated: use the
      returned state.
    stop: as in `generate`.
    max_rounds: int32; may differ between calls without recompilation. None for
      no limit.
    max_finished: int32; returns as soon as this many more rows are done, so
      that they can be refilled. None waits for all rows.

  Raises:
    ValueError: the drafter's number or depth of draft tokens differs from that
      of the drafter given to `prefill`, which sized the state; a stop token is
      outside the vocabulary; or another argument does not fit.
  """
  conditions = stopping.placed(stop, decoder.model)
  max_rounds = _limit('max_rounds', max_rounds)
  max_finished = _limit('max_finished', max_finished)
  return _advance(decoder, params, state, conditions, max_rounds, max_finished)


def _limit(name, value):
  """Returns an int32; None is the largest, so that all calls share a loop."""
  most = np.iinfo(np.int32).max
  remedy = 'give one integer'
  given = checks.integers(name, most if value is None else value, remedy)
  if given.ndim:
    raise ValueError(f'{name} has shape {given.shape}: {remedy}')
  return given.clip(max=most).astype(np.int32)


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def _advance(decoder, params, state, stop, max_rounds, max_finished):
  request_lib.check_state(decoder, state)
  request_lib.check_params(decoder, params)
  num_rows = state.done.size
  enough = jnp.sum(state.done) + jnp.minimum(max_finished, num_rows)
  enough = jnp.minimum(enough, num_rows)

  def cond(carry):
    state, rounds = carry
    return (rounds < max_rounds) & (jnp.sum(state.done) < enough)

  def next_round(carry):
    state, rounds = carry
    return step.step(decoder, params, state, stop)[1], rounds + 1

  state, _ = jax.lax.while_loop(
    cond, next_round, (state, jnp.zeros((), jnp.int32))
  )
  return state


# Under `jax.grad` two leaves of a state may be one buffer, which cannot be
# donated twice.
_advance_and_keep = jax.jit(inspect.unwrap(_advance), static_argnames='decoder')


def finish(
  state: DecodeState,
  *,
  max_new_tokens: ArrayLike | int,
  batch_size: int | None = None,
) -> Output:
  """Returns the emitted tokens of each row, moved to the front.

  The output is whole on every device of a mesh, so that every host can read it.

  Args:
    state: as returned by `advance`.
    max_new_tokens: one number, or one per row, as given to `generate`. M is the
      largest, and a row with more new tokens is cut to its first M.
    batch_size: returns only this many rows, the first ones. By default all
      rows are returned, including any that pad a batch which the mesh does not
      divide evenly.

  Raises:
    ValueError: an argument does not fit.
  """
  request_lib.is_state(state)
  if np.ndim(max_new_tokens):
    max_new_tokens = int(np.max(max_new_tokens))
  most = checks.count('max_new_tokens', max_new_tokens)
  most = min(most, state.tokens.shape[1])
  if batch_size is not None:
    batch_size = checks.count('batch_size', batch_size)
  room = max(_LEAST_COLUMNS, 1 << (most - 1).bit_length())
  return _cut(_emitted(state, room=room), most, batch_size)


@functools.partial(jax.jit, static_argnames='room')
def _emitted(state: DecodeState, *, room: int) -> Output:
  """Returns the output of all rows with `room` columns."""
  lengths = state.length - state.prompt_length
  offsets = jnp.arange(room)
  columns = state.prompt_length[:, None] + offsets
  emitted = offsets < lengths[:, None]

  def emissions(buffer):
    values = jnp.take_along_axis(buffer, columns, axis=1, mode='clip')
    return jnp.where(emitted, values, 0)

  found = Output(
    tokens=emissions(state.tokens),
    lengths=lengths,
    **jax.tree.map(emissions, state.records),
    origin=emissions(state.origin),
    emit_round=emissions(state.emit_round),
    rounds=state.round,
    proposed=state.proposed,
    accepted=state.accepted,
    stop_reason=state.stop_reason,
  )
  return sharding.replicate(found)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(output: Output, max_new_tokens: int, batch_size: int | None) -> Output:
  kept = jax.tree.map(
    lambda x: x[:batch_size], first_columns(output, max_new_tokens)
  )
  lengths = jnp.minimum(kept.lengths, max_new_tokens)
  return dataclasses.replace(kept, lengths=lengths)


def first_columns(output: Output, count: int) -> Output:
  """Returns an output whose rows have only their first `count` columns."""
  names = 'tokens', 'origin', 'emit_round'
  records = 'log_probs', 'warped_log_probs', 'choices'
  cut = lambda name: jax.tree.map(lambda x: x[:, :count], vars(output)[name])
  return dataclasses.replace(output, **{x: cut(x) for x in names + records})


def _first_verdict(decoder, params, request):
  """Judges a draft; only traced, to see whether the rule takes such drafts."""
  state = initial.state(decoder, params, request)
  draft, _ = step.propose(decoder, params, state)
  vocab_size = decoder.model.vocab_size
  batch, num_drafts = draft.tokens.shape
  target_probs = sharding.zeros(
    (batch, num_drafts + 1, vocab_size),
    jnp.float32,
    'batch',
    None,
    sharding.Axis('vocab', vocab_size),
  )
  try:
    return judging.judge(state, draft, target_probs, decoder.verify)
  except ValueError as error:
    name = type(decoder.drafter).__name__
    raise ValueError(f'drafts of {name}: {error}') from error


@functools.partial(jax.jit, static_argnames='decoder')
def _prefill(decoder, params, request):
  model, drafter = decoder.model, decoder.drafter
  state = initial.state(decoder, params, request)
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
    draft = drafter.observe(params, inputs, count, output, None, draft)
    return end, cache, draft

  _, cache, draft = jax.lax.while_loop(
    cond, next_chunk, (jnp.zeros((), jnp.int32), state.cache, state.draft)
  )
  return dataclasses.replace(state, cache=cache, draft=draft)
