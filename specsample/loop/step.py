"""One round of decoding: propose, verify, emit, commit.

Each step feeds the target [pending, d_1, ..., d_K], reads K + 1 distributions
and emits between one and K + 1 tokens per row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sampling as sampling_lib
from specsample import stopping
from specsample import streams
from specsample import types
from specsample.loop import emission as emission_lib
from specsample.loop import judging
from specsample.loop import passes
from specsample.loop.decoder import Decoder
from specsample.types import (
  Array,
  DecodeState,
  Draft,
  DrafterState,
  Params,
  Verdict,
)


@types.pytree
class Round:
  """The input of the verification rule in one round, and the outcome."""

  draft: Draft  # [B, ...]
  target_probs: Array  # [B, N + 1, V], 0 where there is no distribution
  verdict: Verdict  # [B], of which `num_accepted` counts emitted draft tokens
  num_emitted: Array  # [B] int32, number of emitted tokens; 0 in done rows


def step(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  stop: stopping.Conditions,
) -> tuple[Round, DecodeState]:
  """Runs one round: emits up to K + 1 tokens per row that is not done.

  Also returns what the rule was given and decided; nothing is computed for it
  if it is not used.
  """
  # These scopes only name the phases in a profile.
  with jax.named_scope('draft'):
    draft, draft_state = propose(decoder, params, state)
  with jax.named_scope('verify'):
    judged, path, cache = judging.verify(decoder, params, state, draft)
    draft = drafts.follow_valid(draft, judged.valid)
  with jax.named_scope('commit'):
    emission = emission_lib.emit(
      state, draft, judged.verdict, judged.valid, stop
    )
    # The row may stop before the last token that the rule accepted.
    verdict = dataclasses.replace(
      judged.verdict, num_accepted=emission.num_accepted
    )
    # What the target has read: the pending token and the accepted drafts.
    read = jnp.concatenate(
      [passes.pending(state), emission.tokens[:, :-1]], axis=1
    )
    draft_state = decoder.drafter.observe(
      params, read, emission.count, judged.output, verdict, draft_state
    )
    cache = passes.commit(
      decoder, cache, state.length - 1, emission.count, path
    )
    observed = Round(
      draft=draft,
      target_probs=judged.probs,
      verdict=verdict,
      num_emitted=emission.count,
    )
    state = emission_lib.write(state, draft, emission, judged.records)
    return observed, dataclasses.replace(state, cache=cache, draft=draft_state)


def propose(
  decoder: Decoder, params: Params, state: DecodeState
) -> tuple[Draft, DrafterState]:
  """Returns the round's draft [B, ...], cut to what each row may still emit."""
  drafter, round_keys = decoder.drafter, judging.round_keys(state)

  def draw(probs, position, node=None):
    if decoder.verify.positional:
      keys = jax.vmap(streams.position_key)(state.key, position)
      return jax.vmap(sampling_lib.draw_coupled)(keys, probs)
    key = functools.partial(streams.draft_key, node=node)
    return jax.vmap(sampling_lib.draw)(
      jax.vmap(key)(round_keys, position), probs
    )

  proposed = drafter.propose(
    params, draw, judging.warp(state), state.tokens, state.length, state.draft
  )
  _check_proposed(proposed, drafter)
  draft, draft_state = proposed
  # A round emits one token in addition to the accepted drafts.
  keep = drafts.depths(draft) <= (state.limit - state.length - 1)[:, None]
  keep &= drafts.exist(draft, decoder.model.vocab_size)
  if draft.probs is not None:
    keep &= sampling_lib.is_distribution(draft.probs)
  draft = drafts.cut(draft, keep)
  # Nodes that were cut must not widen the pass.
  has_part_widths = len(set(decoder.widths) - {0}) > 1
  return drafts.compact(draft) if has_part_widths else draft, draft_state


def abstract_draft(
  decoder: Decoder, params: Params, state: DecodeState
) -> Draft:
  """Returns the shapes and the kind of a draft; nothing is computed."""
  of = functools.partial(propose, decoder)
  return jax.eval_shape(of, params, state)[0]


def _check_proposed(proposed, drafter):
  name, most = type(drafter).__name__, drafter.num_draft_tokens
  is_pair = isinstance(proposed, tuple) and len(proposed) == 2
  if not (is_pair and isinstance(proposed[0], Draft)):
    raise TypeError(
      f'{name}.propose returned {type(proposed).__name__}: return a pair, the '
      'Draft and the state'
    )
  draft, _ = proposed
  if not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
    raise TypeError(
      f'{name} drafts tokens of dtype {draft.tokens.dtype}: return int32'
    )
  found = draft.tokens.shape[1]
  if found != most:
    raise ValueError(
      f'{name} declares num_draft_tokens {most}, but its draft has {found} '
      'tokens per row: pad the draft with -1, or declare what it drafts'
    )
  depth = found if draft.parents is None else draft.depth
  if depth is None or depth > drafter.depth:
    raise ValueError(
      f'{name} declares depth {drafter.depth}, but Draft.depth is {depth}: '
      'declare the length of the longest path'
    )
