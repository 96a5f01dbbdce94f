"""The state of a batch before its prompts are prefilled."""

from typing import Any

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import streams
from specsample.loop import emission
from specsample.loop import request as request_lib
from specsample.loop.decoder import Decoder
from specsample.types import ByChoice, Choices, DecodeState, Params, TokenCounts


def state(
  decoder: Decoder, params: Params, request: request_lib.Request
) -> DecodeState:
  """Returns the state of a request's rows, with empty caches.

  Its shapes depend only on the batch size and the slots of the request, so that
  rows of different requests can replace each other.
  """
  model, drafter = decoder.model, decoder.drafter
  batch, slots = request.tokens.shape
  per_row = lambda dtype: sharding.zeros((batch,), dtype, 'batch')
  table = lambda width, dtype: sharding.zeros(
    (batch, width), dtype, 'batch', None
  )
  counts = None
  if request.sampling.penalised:
    generated = table(model.vocab_size, jnp.int32)
    prompt = emission.count_tokens(
      generated, request.tokens, request.prompt_length
    )
    counts = TokenCounts(prompt=prompt, generated=generated)
  row_keys = jax.vmap(streams.row_key, (None, 0))(
    request.key, request.request_id
  )
  histogram = table(drafter.depth + 1, jnp.int32)
  # Rings must hold the largest chunk, whatever chunks this request is fed in.
  max_new = max(request_lib.PREFILL_CHUNK, decoder.round_tokens)
  records: dict[str, Any] = {}
  if request.log_probs:
    names = 'log_probs', 'warped_log_probs'
    records = {name: table(slots, jnp.float32) for name in names}
  if isinstance(decoder.verify, ByChoice):
    numbers = lambda: table(slots, jnp.int32)
    records = {'choices': Choices(scored=numbers(), ties=numbers())}
  return DecodeState(
    key=row_keys,
    request_id=request.request_id,
    prompt_length=request.prompt_length,
    length=request.prompt_length,
    limit=request.limit,
    limit_reason=request.limit_reason,
    # Rows that only pad the batch emit nothing.
    done=request.limit <= request.prompt_length,
    stop_reason=per_row(jnp.int32),
    round=per_row(jnp.int32),
    tokens=request.tokens,
    records=records,
    origin=table(slots, jnp.int8),
    emit_round=table(slots, jnp.int32),
    proposed=histogram,
    accepted=histogram,
    sampling=request.sampling,
    counts=counts,
    cache=model.init_cache(batch, slots, max_new),
    draft=drafter.init(params, batch, slots),
    num_draft_tokens=drafter.num_draft_tokens,
  )
