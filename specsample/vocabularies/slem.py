"""Drafting as text, with a draft model of any other vocabulary.

String-level exact match: Timor et al., 2502.05202, Algorithm 2. The draft model
continues the text, the target's tokenizer encodes the continuation, and the
tokens that equal what the target samples are kept. The two vocabularies need
not share anything. The work between rounds runs on the host, where the
tokenizers are.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample import stopping
from specsample import text
from specsample.drafters import chain as chain_lib
from specsample.drafters import given as given_lib
from specsample.loading import load
from specsample.loop import decode
from specsample.loop import request as request_lib
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import Array, ArrayLike, Output, Verifier

# Draft-model tokens per pass: few in a round, many after a prompt.
_CHUNKS = (8, 64)
# Nothing is drafted for a text of t target tokens if it has more than
# _ROOM * t + _SPARE draft-model tokens, because there is no room for more. This
# depends on the row alone, not on its padding or the rest of the batch.
_ROOM, _SPARE = 1.5, 16
# How many preceding tokens a text is encoded with: the first number that works.
_OVERLAPS = (8, 4, 2, 1, 0)


def generate(
  target: load.Loaded,
  draft: load.Loaded,
  prompts: Sequence[Sequence[int]],
  key: Array,
  *,
  num_draft_tokens: int,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  stop: Stop = Stop(),
  request_ids: ArrayLike | None = None,
) -> Output:
  """Continues prompts with a draft model that has its own tokenizer.

  Works like `decode.generate`. A draft is the draft model's most likely text, a
  function of the tokens so far, so with a lossless rule the output has exactly
  the target model's distribution at any temperature.

  Args:
    target, draft: models with their tokenizers.
    prompts: token ids of the target, one list per row.
    key: as in `decode.generate`, as are sampling, max_new_tokens, stop and
      request_ids.
    num_draft_tokens: K, the number of tokens that the draft model writes, and
      the most target tokens of a draft.
    verify: a rule for chains that takes point masses.

  Raises:
    ValueError: as in `decode.generate`; or a model has no tokenizer, or the
      draft model takes too few tokens for K drafts.
  """
  stopping.check(stop, target.model)
  given = given_lib.Given(num_draft_tokens=num_draft_tokens)
  _check(target, draft, num_draft_tokens)
  params = {'target': target.params}
  tokens, lengths = request_lib.pad_prompts(prompts)
  state = decode.prefill(
    Decoder(target.model, given, verify),
    params,
    tokens,
    lengths,
    key,
    request_ids=request_ids,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
  )
  one = jax.device_put(np.int32(1))
  writer = _Writer(draft, num_draft_tokens, *state.tokens.shape)
  while True:
    rows, lengths, done = jax.device_get(
      (state.tokens, state.length, state.done)
    )
    if done.all():
      break
    committed = [
      [] if stopped else row[:length].tolist()
      for row, length, stopped in zip(rows, lengths, done, strict=True)
    ]
    drafts = np.full((len(rows), num_draft_tokens), -1, np.int32)
    texts = [(target.tokenizer.decode(ids), len(ids)) for ids in committed]
    for row, ids, written in zip(
      drafts, committed, writer.go_on(texts), strict=True
    ):
      if written:
        found = following(target.tokenizer, ids, written)[:num_draft_tokens]
        row[: len(found)] = found
    state = decode.advance(
      Decoder(target.model, given, verify),
      params,
      given.give(state, drafts),
      stop=stop,
      max_rounds=one,
    )
  return decode.finish(
    state, max_new_tokens=max_new_tokens, batch_size=len(prompts)
  )


def following(
  tokenizer: text.Tokenizer, ids: Sequence[int], written: str
) -> list[int]:
  """Returns the token ids of a text that follows `ids`, which stay as they are.

  The text is encoded together with the last few ids, so that it continues them
  as the tokenizer would. If that would change these ids, fewer of them are
  taken, and in the end none.
  """
  ends = [list(ids[max(0, len(ids) - n) :]) if n else [] for n in _OVERLAPS]
  whole = tokenizer.encode_all(
    [tokenizer.decode(end) + written for end in ends]
  )
  return next(
    found[len(end) :]
    for end, found in zip(ends, whole, strict=True)
    if found[: len(end)] == end
  )


def _check(target, draft, num_draft_tokens):
  """Raises ValueError for models that cannot write drafts for the target."""
  for loaded in (target, draft):
    _ = loaded.tokenizer  # says what is missing
  chain_lib.Chain(model=draft.model, num_draft_tokens=num_draft_tokens)
  if draft.model.max_length <= num_draft_tokens:
    raise ValueError(
      f'the draft model takes at most {draft.model.max_length} tokens, too few '
      f'for {num_draft_tokens} draft tokens after a text: draft fewer tokens, '
      'or use a draft model with a longer context'
    )


class _Writer:
  """A draft model that continues texts and reuses what its cache holds."""

  def __init__(self, draft, num_draft_tokens, batch_size, num_slots):
    self._tokenizer = draft.tokenizer
    self._params = {'drafter': draft.params}
    self._chain = chain_lib.Chain(
      model=draft.model, num_draft_tokens=num_draft_tokens
    )
    room = math.ceil(_ROOM * num_slots) + _SPARE
    self._room = min(room, draft.model.max_length - num_draft_tokens)
    self._fed: list[list[int]] = [[] for _ in range(batch_size)]
    self._state = self._chain.init(
      self._params, batch_size, self._room + max(_CHUNKS) + num_draft_tokens
    )

  def go_on(self, texts: Sequence[tuple[str, int]]) -> list[str]:
    """Returns a continuation of each text, '' if it is empty or has no room.

    Each text comes with its number of target tokens.
    """
    rows = [self._tokenizer.encode(text) if text else [] for text, _ in texts]
    fits = [
      0 < len(row) <= min(_ROOM * count + _SPARE, self._room)
      for row, (_, count) in zip(rows, texts, strict=True)
    ]
    # The other rows get a dummy token, and their drafts are ignored.
    rows = [row if fit else [0] for row, fit in zip(rows, fits, strict=True)]
    known = list(map(_num_equal, rows, self._fed))
    missing = max(
      len(row) - count for row, count in zip(rows, known, strict=True)
    )
    tokens = np.zeros((len(rows), self._room + max(_CHUNKS)), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
      row[: len(ids)] = ids
    lengths = np.asarray([len(row) for row in rows], np.int32)
    inputs = (tokens, lengths, np.asarray(known, np.int32))
    axes = (('batch', None), ('batch',), ('batch',))
    drafted, self._state = _continue(
      self._params,
      *sharding.place(inputs, axes),
      self._state,
      chain=self._chain,
      chunk=next((n for n in _CHUNKS if missing <= 2 * n), max(_CHUNKS)),
    )
    drafted = jax.device_get(drafted).tolist()
    # The last draft token was not fed.
    self._fed = [row + new[:-1] for row, new in zip(rows, drafted, strict=True)]
    return [
      self._text(row, new) if fit else ''
      for row, new, fit in zip(rows, drafted, fits, strict=True)
    ]

  def _text(self, row, new):
    """Returns the text of new tokens, up to EOS or the last whole character.

    It also ends at -1, where the draft model has no distribution.
    """
    ends = {-1, *self._tokenizer.eos_ids}
    new = new[: next((i for i, token in enumerate(new) if token in ends), None)]
    before = row[-max(_OVERLAPS) :]
    known = self._tokenizer.decode(before)
    # Decoded after other tokens: some tokenizers strip the first token's space.
    return self._tokenizer.decode(before + new)[len(known) :].rstrip('\ufffd')


@functools.partial(
  jax.jit, static_argnames=('chain', 'chunk'), donate_argnames=('state',)
)
def _continue(
  params: Any,
  tokens: Array,
  length: Array,
  known: Array,
  state: chain_lib.ChainState,
  *,
  chain: chain_lib.Chain,
  chunk: int,
) -> tuple[Array, chain_lib.ChainState]:
  """Returns the most likely tokens [B, K] after the first length [B] tokens.

  The first known [B] of those are in the state's cache already.
  """
  before = length - 1
  kept = jnp.minimum(known, before)
  state = dataclasses.replace(
    state, cache=chain.model.commit(state.cache, kept), length=kept
  )

  def cond(state):
    return jnp.any(state.length < before)

  def feed(state):
    take = lambda row, i: jax.lax.dynamic_slice(row, (i,), (chunk,))
    new = jax.vmap(take)(tokens, state.length)
    count = jnp.clip(before - state.length, 0, chunk)
    return chain.observe(params, new, count, None, None, state)

  state = jax.lax.while_loop(cond, feed, state)
  draft, state = chain.propose(
    params,
    lambda logits, position: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    lambda logits, drafted: logits,
    tokens,
    length,
    state,
  )
  return draft.tokens, state


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns the length of the common prefix of two rows of tokens."""
  pairs = enumerate(zip(one, other, strict=False))
  shorter = min(len(one), len(other))
  return next((i for i, (a, b) in pairs if a != b), shorter)
