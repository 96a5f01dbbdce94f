"""Drafts text with a model of any other vocabulary: the two share nothing.

String-level exact match: Timor et al., 2502.05202, Algorithm 2. The draft model
continues the text, the target's tokenizer makes tokens of the continuation, and
those are kept that equal what the target samples. Between the rounds this runs
on the host, where the tokenizers are.
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
from specsample import text
from specsample.drafters import chain as chain_lib
from specsample.drafters import given as given_lib
from specsample.loading import load
from specsample.loop import decode
from specsample.loop import request as request_lib
from specsample.loop.stopping import Stop
from specsample.sampling import Sampling
from specsample.types import Array, ArrayLike, Output, Verifier

# Tokens of the draft model that a pass takes in: behind a prompt, in a round.
_CHUNKS = (8, 64)
# Behind a text of t of the target's tokens nothing is drafted where it has more
# than _ROOM * t + _SPARE of the draft model's: there is room for no more. That
# is a rule of the row alone, whatever it is padded to and in whatever batch.
_ROOM, _SPARE = 1.5, 16
# Tokens before a text with which it is encoded, the first that fit.
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
  """As `decode.generate`, with drafts of a model that has its own tokenizer.

  A draft is the draft model's most likely text, a function of the tokens so
  far, so the output is distributed as the target alone at any temperature.

  Args:
    target, draft: models with their tokenizers.
    prompts: token ids of the target, a list for each row.
    key: as `decode.generate`'s, as are sampling, max_new_tokens, stop and
      request_ids.
    num_draft_tokens: K, of the target's tokens and of the draft model's.
    verify: a rule for chains that takes point masses.

  Raises:
    ValueError: as `decode.generate`; a model without a tokenizer.
  """
  stop.check(target.model.vocab_size)
  given = given_lib.Given(num_draft_tokens=num_draft_tokens)
  params = {'target': target.params}
  tokens, lengths = request_lib.pad_prompts(prompts)
  state = decode.prefill(
    params,
    tokens,
    lengths,
    key,
    request_ids=request_ids,
    model=target.model,
    drafter=given,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    verify=verify,
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
      params,
      given.give(state, drafts),
      model=target.model,
      drafter=given,
      verify=verify,
      stop=stop,
      max_rounds=one,
    )
  most = decode.most_new_tokens(state, max_new_tokens)
  return decode.finish(state, max_new_tokens=most, batch_size=len(prompts))


def following(
  tokenizer: text.Tokenizer, ids: Sequence[int], written: str
) -> list[int]:
  """Token ids of a text that follows others, which stay as they are.

  As the tokenizer would go on from the last of them; where it would have made
  other tokens of those, as of a text of its own.
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


class _Writer:
  """Goes on with texts by a draft model, whose cache keeps what it can."""

  def __init__(self, draft, num_draft_tokens, batch_size, num_slots):
    self._tokenizer = draft.tokenizer
    self._params = {'drafter': draft.params}
    self._chain = chain_lib.Chain(
      model=draft.model, num_draft_tokens=num_draft_tokens
    )
    room = math.ceil(_ROOM * num_slots) + _SPARE
    self._room = min(room, draft.model.max_length - num_draft_tokens)
    if self._room < 1:
      raise ValueError(
        f'the draft model takes {draft.model.max_length} tokens: too few for '
        f'{num_draft_tokens} drafts behind a text'
      )
    self._fed: list[list[int]] = [[] for _ in range(batch_size)]
    self._state = self._chain.init(
      self._params, batch_size, self._room + max(_CHUNKS) + num_draft_tokens
    )

  def go_on(self, texts: Sequence[tuple[str, int]]) -> list[str]:
    """What follows each text, '' where there is no room or it is empty.

    Beside a text is how many of the target's tokens it has.
    """
    rows = [self._tokenizer.encode(text) if text else [] for text, _ in texts]
    fits = [
      0 < len(row) <= min(_ROOM * count + _SPARE, self._room)
      for row, (_, count) in zip(rows, texts, strict=True)
    ]
    # Of the others the draft is not looked at.
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
    # The last draft was not fed.
    self._fed = [row + new[:-1] for row, new in zip(rows, drafted, strict=True)]
    return [
      self._text(row, new) if fit else ''
      for row, new, fit in zip(rows, drafted, fits, strict=True)
    ]

  def _text(self, row, new):
    """The text of new tokens behind a row, to the end or its last character."""
    ends = set(self._tokenizer.eos_ids)
    new = new[: next((i for i, token in enumerate(new) if token in ends), None)]
    before = row[-max(_OVERLAPS) :]
    known = self._tokenizer.decode(before)
    # Behind others, because some tokenizers take the space off the first.
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
  """The most likely next tokens [B, K], by the first length [B] of tokens.

  Of those the first known [B] are in the state's cache.
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
    return chain.extend(params, new, count, None, state)

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
  """How many tokens two rows begin with alike."""
  pairs = enumerate(zip(one, other, strict=False))
  shorter = min(len(one), len(other))
  return next((i for i, (a, b) in pairs if a != b), shorter)
