"""One round of decoding: propose, score, verify, emit.

Each step feeds the target [pending, d_1, ..., d_K], reads K + 1 distributions
and emits between one and K + 1 tokens a row.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import emission as emission_lib
from specsample import indexing
from specsample import sampling as sampling_lib
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
  Params,
  Verdict,
  Verifier,
  Warp,
)


@types.pytree
class Round:
  """What the rule was given in a round, and what came of it."""

  draft: Draft  # [B, ...]
  target_probs: Array  # [B, N + 1, V], 0 where there is no distribution
  num_accepted: Array  # [B] int32, how many drafts are emitted
  num_emitted: Array  # [B] int32, tokens; 0 in rows that were done


@types.pytree
class Scored:
  """What the target says of a draft; zeros behind what it read."""

  output: ModelOutput  # [B, N + 1, ...], as the model gave it
  probs: Array  # [B, N + 1, V], the distributions after each node
  log_sum_exp: Array  # [B, N + 1] float32, of the logits


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
  _, state = observed_step(
    params, state, model=model, drafter=drafter, verify=verify, stop=stop
  )
  return state


def observed_step(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  stop: stopping.Stop,
) -> tuple[Round, DecodeState]:
  """As `step`, and what was decided over."""
  # Names that a profile shows; nothing is computed otherwise.
  with jax.named_scope('draft'):
    draft, draft_state = propose(
      params, state, model=model, drafter=drafter, verify=verify
    )
  with jax.named_scope('verify'):
    (scored, valid, verdict), cache = _verified(
      params, state, draft, model=model, drafter=drafter, verify=verify
    )
    draft = _keep_behind(draft, valid)
    target_probs = scored.probs
  with jax.named_scope('commit'):
    emission = emission_lib.of(state, draft, verdict, valid, stop)
    path = _path(draft, verdict)
    if path is not None:
      along = lambda x: _take_nodes(x, path)
      scored = jax.tree.map(along, scored)
    output = scored.output

    append = lambda buffer, values: emission_lib.append(
      buffer, values, state.length, emission.count
    )
    tokens = append(state.tokens, emission.tokens)
    length = state.length + emission.count
    verdict = dataclasses.replace(verdict, num_accepted=emission.num_accepted)
    draft_state = drafter.update(
      params, tokens, length, output, verdict, draft_state
    )
    rounds = jnp.broadcast_to(state.round[:, None], emission.tokens.shape)
    logits = output.logits.astype(jnp.float32)
    log_probs = indexing.pick(logits, emission.tokens) - scored.log_sum_exp
    observed = Round(
      draft=draft,
      target_probs=target_probs,
      num_accepted=emission.num_accepted,
      num_emitted=emission.count,
    )
    return observed, dataclasses.replace(
      state,
      length=length,
      done=emission.done,
      stop_reason=emission.stop_reason,
      round=state.round + ~state.done,
      tokens=tokens,
      log_probs=append(state.log_probs, log_probs),
      origin=append(state.origin, emission.origin),
      emit_round=append(state.emit_round, rounds),
      proposed=_tally(state.proposed, drafts.depth(draft), state.done),
      accepted=_tally(state.accepted, emission.num_accepted, state.done),
      counts=emission_lib.update_counts(state.counts, emission),
      cache=_commit(state, cache, length - 1, path, model),
      draft=draft_state,
    )


def propose(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
) -> tuple[Draft, DrafterState]:
  """The round's draft [B, ...], no longer than what each row may emit."""
  round_keys = _round_keys(state)

  def draw(probs, position, node=None):
    if verify.positional:
      keys = jax.vmap(streams.position_key)(state.key, position)
      return jax.vmap(sampling_lib.draw_coupled)(keys, probs)
    key = functools.partial(streams.draft_key, node=node)
    return jax.vmap(sampling_lib.draw)(
      jax.vmap(key)(round_keys, position), probs
    )

  draft, draft_state = drafter.propose(
    params, draw, _warp(state), state.tokens, state.length, state.draft
  )
  # A round emits one token more than it keeps drafts.
  keep = drafts.depths(draft) <= (state.limit - state.length - 1)[:, None]
  keep &= drafts.exist(draft, model.vocab_size)
  if draft.probs is not None:
    keep &= sampling_lib.is_distribution(draft.probs)
  draft = drafts.cut(draft, keep)
  # Nodes that were cut must not widen the pass.
  has_part_widths = len(set(widths(model, drafter)) - {0}) > 1
  return drafts.compact(draft) if has_part_widths else draft, draft_state


def score(
  params: Params,
  state: DecodeState,
  draft: Draft,
  *,
  model: Model,
  drafter: Drafter,
) -> tuple[Scored, Cache]:
  """The target's pass over [pending, d_1, ..., d_N].

  A pass over the first of the drafter's `widths` that holds the drafts of every
  row: over the pending token alone if nothing was drafted. The distributions
  have that width too: for a large vocabulary they take longer than a small
  model's layers.
  """
  num_drafts = draft.tokens.shape[1]

  def padded(scored, of_width):
    missing = num_drafts - of_width.tokens.shape[1]
    return jax.tree.map(lambda x: _pad(x, missing), scored)

  return _passes(params, state, draft, padded, model=model, drafter=drafter)


def _verified(params, state, draft, *, model, drafter, verify):
  """What was scored, what of it is valid [B, N + 1], and the verdict.

  The rule sees no more of a chain than the pass did, because over a large
  vocabulary it costs as much as a layer; of a tree it sees all nodes.
  """
  num_drafts = draft.tokens.shape[1]

  def judged(scored, of_width):
    missing = num_drafts - of_width.tokens.shape[1]
    pad = lambda x: _pad(x, missing)
    valid = sampling_lib.is_distribution(scored.probs)
    # A rule looks at all positions at once: of those without a distribution it
    # must see neither the draft nor a NaN.
    probs = jnp.where(valid[..., None], scored.probs, 0)
    scored = dataclasses.replace(scored, probs=probs)
    if draft.parents is not None:
      scored, valid = jax.tree.map(pad, (scored, valid))
      kept = _keep_behind(draft, valid)
      return scored, valid, judge(state, kept, scored.probs, verify)
    verdict = judge(state, _keep_behind(of_width, valid), probs, verify)
    return *jax.tree.map(pad, (scored, valid)), verdict

  return _passes(params, state, draft, judged, model=model, drafter=drafter)


def _passes(
  params: Params,
  state: DecodeState,
  draft: Draft,
  then: Callable[[Scored, Draft], Any],
  *,
  model: Any,  # a Model, perhaps Readable
  drafter: Drafter,
) -> tuple[Any, Cache]:
  """The target's pass of the width that is needed, what is done then, a cache.

  `then` gets what was scored of that many drafts, and those drafts. It returns
  the same shapes for all widths.
  """
  pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
  inputs = jnp.concatenate([pending, jnp.maximum(draft.tokens, 0)], axis=1)
  num_drafts, of_passes = draft.tokens.shape[1], widths(model, drafter)

  def of_first(width, function: Callable) -> tuple:
    behind = {}
    if draft.parents is not None:
      behind = {'parents': draft.parents[:, :width]}
    output, new = function(
      params['target'],
      inputs[:, : width + 1],
      state.cache,
      features=drafter.feature_layers,
      **behind,
    )
    logits = output.logits
    scored = Scored(
      output=output,
      probs=_target_probs(state, draft, logits),
      log_sum_exp=jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1),
    )
    return then(scored, drafts.first(draft, width)), new

  if len(of_passes) == 1:
    return of_first(num_drafts, model.apply)

  def read(width):
    found, new = of_first(width, model.read)
    return found, model.widen(new, num_drafts + 1)

  needed = jnp.max(jnp.where(state.done, 0, drafts.width(draft)))
  found, new = jax.lax.switch(
    jnp.sum(needed > jnp.asarray(of_passes)),
    [functools.partial(read, width) for width in of_passes],
  )
  return found, model.append(state.cache, new)


def _pad(x: Array, missing: int) -> Array:
  """x [B, n, ...] with so many more zeros in its second axis."""
  return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))


def widths(model: Model, drafter: Drafter) -> tuple[int, ...]:
  """The numbers of drafts for which a pass is compiled, rising.

  A model without `types.Readable.read` has the widest pass alone: several would
  each copy its cache.
  """
  widest = (drafter.num_draft_tokens,)
  is_readable = hasattr(model, 'read')
  return getattr(drafter, 'widths', widest) if is_readable else widest


def judge(
  state: DecodeState, draft: Draft, target_probs: Array, verify: Verifier
) -> Verdict:
  """The verdict [B] on the draft under target_probs [B, N + 1, V]."""
  keys = _round_keys(state)
  if verify.positional:
    positions = state.length[:, None] + jnp.arange(target_probs.shape[1])
    position_keys = jax.vmap(streams.position_key, (None, 0))
    keys = jax.vmap(position_keys)(state.key, positions)
  return jax.vmap(verify)(keys, draft, target_probs)


def _commit(state, cache, length, path, model) -> Cache:
  """The first length [B] tokens, and of a tree the kept path among them."""
  if path is None:
    return model.commit(cache, length)
  # The pending token is the last of those before.
  return model.commit(cache, length, state.length[:, None] - 1 + path)


def _target_probs(state, draft, logits):
  """The distributions [B, n, V] of logits after the first n nodes."""
  # prefixes[:, i]: the drafts up to node i, what its penalties count.
  prefixes = jnp.where(drafts.on_the_way(draft), draft.tokens[:, None], -1)
  prefixes = prefixes[:, : logits.shape[1]]
  return jax.vmap(_warp(state), in_axes=1, out_axes=1)(logits, prefixes)


def _round_keys(state):
  return jax.vmap(streams.round_key)(state.key, state.round)


def _warp(state) -> Warp:
  return lambda logits, drafted: jax.vmap(sampling_lib.warp)(
    state.sampling, state.counts, logits, drafted
  )


def _path(draft, verdict) -> Array | None:
  """The pending token and the nodes kept, [B, P + 1]; None on a chain."""
  if draft.parents is None:
    return None
  return jnp.pad(verdict.path, ((0, 0), (1, 0)))


def _take_nodes(x, path):
  """x [B, N + 1, ...] of the nodes path [B, n]."""
  return jnp.take_along_axis(
    x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1
  )


def _tally(histogram, index, done):
  one = jax.nn.one_hot(index, histogram.shape[1], dtype=histogram.dtype)
  return jnp.where(done[:, None], histogram, histogram + one)


def _keep_behind(draft: Draft, valid: Array) -> Draft:
  """Keeps drafts behind nodes that are all valid [B, N + 1]."""
  before = valid[:, :-1]
  if draft.parents is not None:
    before = jnp.take_along_axis(valid, draft.parents, axis=1)
  return drafts.cut(draft, before)
