"""Multi-turn decoding: rows continue with more text, as in a chat.

The target's cache is kept, so that only the new text is read.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import sharding
from specsample.loop import emission
from specsample.loop import request as request_lib
from specsample.loop.decoder import Decoder
from specsample.types import (
  Array,
  ArrayLike,
  DecodeState,
  Model,
  Params,
  StopReason,
  TokenCounts,
  Verdict,
)

# Tokens per pass of the target if the drafter has no state.
CHUNK = 32


def room(state: DecodeState, model: Model) -> int:
  """Returns how many tokens a row may have, its new text included."""
  slots = state.tokens.shape[1]
  # As `request.round_tokens`: drafts, or a path of full length.
  of_round = max(state.num_draft_tokens + 1, state.proposed.shape[1])
  return min(slots - max(CHUNK, of_round), model.max_length)


def extend(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  tokens: ArrayLike,
  lengths: ArrayLike,
  *,
  max_new_tokens: int,
) -> DecodeState:
  """Appends a text to each row, which `advance` then continues.

  The tokens that a row has emitted so far become part of its prompt. Its random
  bits differ from those of a new call, because its round count continues. Each
  pass reads `turns.CHUNK` tokens, or K + 1 if the drafter has a state (for a
  tree, its depth + 1). For a long text it may then be faster to `prefill`
  everything again.

  Args:
    decoder, params: as in `decode.prefill`.
    state: as returned by `prefill`, `advance` or this function; its rows may be
      done or not. Its buffers are donated: use the returned state.
    tokens: [B, T] int32, the texts.
    lengths: [B] int32, number of tokens in each text, at least 0.
    max_new_tokens: the most further tokens to emit per row.

  Raises:
    ValueError: the drafter cannot sit out a round, the state was made for
      another one, or a text does not fit.
  """
  model, drafter = decoder.model, decoder.drafter
  request_lib.check_state(decoder, state)
  checks.count('max_new_tokens', max_new_tokens)
  if not drafter.can_pause:
    raise ValueError(
      f'{type(drafter).__name__} cannot sit out a round, so its state cannot '
      'be extended: prefill the whole text, or draft with another drafter'
    )
  given = checks.integers('tokens', tokens, 'give token ids [B, T], int32')
  count = checks.integers('lengths', lengths, 'give the lengths [B], int32')
  batch, slots = state.tokens.shape
  if given.ndim != 2 or given.shape[0] != batch or count.shape != (batch,):
    raise ValueError(
      f'tokens have shape {given.shape} and lengths {count.shape}: give '
      f'[{batch}, T] and [{batch}], a text for each row of the state'
    )
  if count.min() < 0 or count.max() > given.shape[1]:
    raise ValueError(
      f'lengths are {count.tolist()}, but each row of tokens holds '
      f'{given.shape[1]}: give lengths from 0 to that'
    )
  new = np.where(np.arange(given.shape[1]) < count[:, None], given, 0)
  if new.size and not 0 <= new.min() <= new.max() < model.vocab_size:
    raise ValueError(
      f'tokens range from {new.min()} to {new.max()}, but the vocabulary has '
      f"{model.vocab_size}: were they made by another model's tokenizer?"
    )
  most = room(state, model)
  after = np.asarray(jax.device_get(state.length)) + count
  if after.max() >= most:
    raise ValueError(
      f'a text of {count[after.argmax()]} tokens makes its row '
      f'{after.max()} tokens long, but there is room for {most}, the answer '
      'included: shorten it, or prefill with a larger max_length'
    )
  # Padded, so that texts of any length have one shape.
  padded = np.zeros((batch, slots), np.int32)
  padded[:, : new.shape[1]] = new[:, :slots]
  placed = sharding.place(
    {'new': padded, 'count': count.astype(np.int32)},
    {'new': ('batch', None), 'count': ('batch',)},
  )
  return _extend(
    decoder,
    params,
    state,
    **placed,
    max_new_tokens=np.int32(min(max_new_tokens, most)),
  )


@functools.partial(jax.jit, static_argnames='decoder', donate_argnames='state')
def _extend(decoder, params, state, new, count, max_new_tokens):
  length = state.length + count
  tokens = emission.append(state.tokens, new, state.length, count)
  cache, draft = _fed(decoder, params, state, tokens, length - 1)
  most = room(state, decoder.model)
  limit = jnp.minimum(length + max_new_tokens, most)
  is_cut = length + max_new_tokens > most
  counts = state.counts
  if counts is not None:  # all tokens so far count as prompt
    prompt = counts.prompt + counts.generated
    counts = TokenCounts(
      prompt=emission.count_tokens(prompt, new, count),
      generated=jnp.zeros_like(counts.generated),
    )
  reason = jnp.where(is_cut, StopReason.CACHE_FULL, StopReason.MAX_NEW_TOKENS)
  return dataclasses.replace(
    state,
    tokens=tokens,
    length=length,
    prompt_length=length,
    limit=limit,
    limit_reason=reason.astype(jnp.int32),
    done=limit <= length,
    stop_reason=jnp.zeros_like(state.stop_reason),
    counts=counts,
    cache=cache,
    draft=draft,
  )


def _fed(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  tokens: Array,
  end: Array,
) -> tuple[Any, Any]:
  """Returns the cache and the drafter's state after the first end [B] tokens.

  A drafter with a state sees the text as rounds whose drafts were all kept, as
  if another drafter had made them.
  """
  model, drafter = decoder.model, decoder.drafter
  has_state = bool(jax.tree.leaves(state.draft))
  width = drafter.depth + 1 if has_state else CHUNK
  last = tokens.shape[1] - 1

  def cond(carry):
    fed, *_ = carry
    return jnp.any(fed < end)

  def body(carry):
    fed, cache, draft = carry
    taken = jnp.minimum(end - fed, width)
    index = jnp.minimum(fed[:, None] + jnp.arange(width), last)
    inputs = jnp.take_along_axis(tokens, index, axis=1)
    if has_state:
      draft = drafter.pause(params, tokens, fed + 1, draft)
    output, cache = model.apply(
      params['target'], inputs, cache, features=drafter.feature_layers
    )
    fed = fed + taken
    cache = model.commit(cache, fed)
    if has_state:
      pending = jnp.take_along_axis(tokens, fed[:, None], axis=1)[:, 0]
      verdict = Verdict(
        num_accepted=jnp.maximum(taken - 1, 0), next_token=pending
      )
      draft = drafter.observe(params, inputs, taken, output, verdict, draft)
    return fed, cache, draft

  _, cache, draft = jax.lax.while_loop(
    cond, body, (state.length - 1, state.cache, state.draft)
  )
  if has_state:
    draft = drafter.resume(params, tokens, end + 1, draft)
  return cache, draft
