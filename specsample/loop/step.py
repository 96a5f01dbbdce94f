"""One round of decoding: propose, score, verify, emit.

Each step feeds the target [pending, d_1, ..., d_K], reads K + 1 distributions
and emits between one and K + 1 tokens per row.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import indexing
from specsample import sampling as sampling_lib
from specsample import streams
from specsample import types
from specsample.loop import certified
from specsample.loop import dependence
from specsample.loop import emission as emission_lib
from specsample.loop import stopping
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
  """The input of the verification rule in one round, and the outcome."""

  draft: Draft  # [B, ...]
  target_probs: Array  # [B, N + 1, V], 0 where there is no distribution
  verdict: Verdict  # [B], of which `num_accepted` counts emitted draft tokens
  num_emitted: Array  # [B] int32, number of emitted tokens; 0 in done rows


@types.pytree
class Judged:
  """The target's output for a draft, and the verdict on the draft.

  Passes of all widths give the same shapes: positions that a narrow pass did
  not read are zeros.
  """

  output: ModelOutput  # [B, P + 1, ...]: pending token, then drafts or path
  probs: Array  # [B, N + 1, V], 0 where there is no distribution
  valid: Array  # [B, N + 1] bool, whether there is a distribution
  verdict: Verdict  # [B]
  # For the kept drafts and the next token, [B, P + 1] each: what the state's
  # `log_probs`, `warped_log_probs`, `scored` and `ties` record, as far as the
  # state has them.
  records: dict[str, Array]


def step(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  stop: stopping.Conditions,
) -> tuple[Round, DecodeState]:
  """Runs one round: emits up to K + 1 tokens per row that is not done.

  Also returns what the rule was given and decided; nothing is computed for it
  if it is not used.
  """
  # These scopes only name the phases in a profile.
  with jax.named_scope('draft'):
    draft, draft_state = propose(
      params, state, model=model, drafter=drafter, verify=verify
    )
  with jax.named_scope('verify'):
    judged, cache = _judged(
      params, state, draft, model=model, drafter=drafter, verify=verify
    )
    draft = _keep_behind(draft, judged.valid)
  with jax.named_scope('commit'):
    emission = emission_lib.emit(
      state, draft, judged.verdict, judged.valid, stop
    )
    verdict = dataclasses.replace(
      judged.verdict, num_accepted=emission.num_accepted
    )
    pending = _pending(state)
    draft_state = drafter.observe(
      params,
      jnp.concatenate([pending, emission.tokens[:, :-1]], axis=1),
      emission.count,
      judged.output,
      verdict,
      draft_state,
    )
    cache = commit(
      *(cache, state.length - 1, emission.count, _path(draft, verdict)),
      model=model,
    )
    observed = Round(
      draft=draft,
      target_probs=judged.probs,
      verdict=verdict,
      num_emitted=emission.count,
    )
    state = _write(state, draft, emission, judged)
    return observed, dataclasses.replace(state, cache=cache, draft=draft_state)


def _write(state, draft, emission, judged) -> DecodeState:
  """Returns the state with what a round emitted, all but the caches."""
  append = lambda buffer, values: emission_lib.append(
    buffer, values, state.length, emission.count
  )
  records = {
    name: append(getattr(state, name), values)
    for name, values in judged.records.items()
  }
  rounds = jnp.broadcast_to(state.round[:, None], emission.tokens.shape)
  return dataclasses.replace(
    state,
    length=state.length + emission.count,
    done=emission.done,
    stop_reason=emission.stop_reason,
    round=state.round + ~state.done,
    tokens=append(state.tokens, emission.tokens),
    origin=append(state.origin, emission.origin),
    emit_round=append(state.emit_round, rounds),
    proposed=_tally(state.proposed, drafts.depth(draft), state.done),
    accepted=_tally(state.accepted, emission.num_accepted, state.done),
    sampling=emission.sampling,
    counts=emission_lib.update_counts(state.counts, emission),
    **records,
  )


def propose(
  params: Params,
  state: DecodeState,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
) -> tuple[Draft, DrafterState]:
  """Returns the round's draft [B, ...], cut to what each row may still emit."""
  round_keys = _round_keys(state)

  def draw(probs, position, node=None):
    if verify.positional:
      keys = jax.vmap(streams.position_key)(state.key, position)
      return jax.vmap(sampling_lib.draw_coupled)(keys, probs)
    key = functools.partial(streams.draft_key, node=node)
    return jax.vmap(sampling_lib.draw)(
      jax.vmap(key)(round_keys, position), probs
    )

  proposed = drafter.propose(
    params, draw, _warp(state), state.tokens, state.length, state.draft
  )
  _check_proposed(proposed, drafter)
  draft, draft_state = proposed
  # A round emits one token in addition to the drafts that it keeps.
  keep = drafts.depths(draft) <= (state.limit - state.length - 1)[:, None]
  keep &= drafts.exist(draft, model.vocab_size)
  if draft.probs is not None:
    keep &= sampling_lib.is_distribution(draft.probs)
  draft = drafts.cut(draft, keep)
  # Nodes that were cut must not widen the pass.
  has_part_widths = len(set(widths(model, drafter)) - {0}) > 1
  return drafts.compact(draft) if has_part_widths else draft, draft_state


def abstract_draft(params: Params, state: DecodeState, **components) -> Draft:
  """Returns the shapes and the kind of a draft; nothing is computed."""
  of = functools.partial(propose, **components)
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


def score(
  params: Params,
  state: DecodeState,
  draft: Draft,
  path: Array | None = None,
  *,
  model: Model,
  drafter: Drafter,
) -> tuple[ModelOutput, Cache]:
  """Runs the target over [pending, d_1, ..., d_N], as a round does.

  The pass covers the first of the drafter's `widths` that holds the drafts of
  every row; at width 0 it reads the pending token alone. The output is padded
  with zeros to N + 1 positions. The cache is for `commit`, with the same path.

  Args:
    params, state, draft, model, drafter: as in a round.
    path: [B, P + 1] int32, the nodes of a tree that will be kept, the pending
      token's 0 first; None for a chain.
  """
  num_drafts = draft.tokens.shape[1]

  def padded(output, of_width):
    missing = num_drafts - of_width.tokens.shape[1]
    return _pad(output, missing)

  return _passes(
    *(params, state, draft, padded, lambda output: path),
    model=model,
    drafter=drafter,
  )


def _judged(
  params: Params,
  state: DecodeState,
  draft: Draft,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
) -> tuple[Judged, Cache]:
  """Runs the same pass as `score`, then the rule on its output.

  The rule sees only the positions that the pass read, because over a large
  vocabulary a rule costs as much as a layer.
  """

  def judged(output, of_width):
    chosen = None
    if certified.is_by_choice(verify):
      chosen = certified.choose(
        params, state, of_width, output.hidden, model=model, verify=verify
      )
      valid = chosen.valid
      one_hot = chosen.tokens[..., None] == indexing.vocab_ids(model.vocab_size)
      probs = one_hot.astype(jnp.float32)
      output = dataclasses.replace(output, logits=output.hidden[..., :0])
    else:
      probs = _target_probs(state, of_width, output.logits)
      valid = sampling_lib.is_distribution(probs)
    # A rule looks at all positions at once, so it must see neither NaN nor the
    # drafts that follow a position without a distribution.
    probs = jnp.where(valid[..., None], probs, 0)
    of_width = _keep_behind(of_width, valid)
    if certified.is_by_choice(verify) and chosen is not None:
      verdict = jax.vmap(verify.of_choices)(of_width, chosen.tokens)
    else:
      verdict = judge(state, of_width, probs, verify)
    path = _path(of_width, verdict)
    records = {}
    if chosen is not None:
      records = {'scored': chosen.scored, 'ties': chosen.ties}
    if state.log_probs is not None:
      logits = output.logits.astype(jnp.float32)
      tokens = emission_lib.tokens(of_width, verdict)
      if path is not None:
        tokens = _at_nodes(tokens, path, logits.shape[1])
      log_sum_exp = jax.nn.logsumexp(logits, axis=-1)
      records |= {
        'log_probs': indexing.pick(logits, tokens) - log_sum_exp,
        'warped_log_probs': jnp.log(indexing.pick(probs, tokens)),
      }
    if path is not None:
      take = lambda x: _take_nodes(x, path)
      output, records = jax.tree.map(take, (output, records))
    missing = draft.tokens.shape[1] - of_width.tokens.shape[1]
    of_path = missing if path is None else 0  # a path is as long in all passes
    return Judged(
      output=_pad(output, of_path),
      probs=_pad(probs, missing),
      valid=_pad(valid, missing),
      verdict=verdict,
      records=_pad(records, of_path),
    )

  return _passes(
    *(params, state, draft, judged, lambda found: _path(draft, found.verdict)),
    model=model,
    drafter=drafter,
  )


def _passes(
  params: Params,
  state: DecodeState,
  draft: Draft,
  then: Callable[[ModelOutput, Draft], Any],
  path_of: Callable[[Any], Array | None],
  *,
  model: Any,  # a Model, perhaps Readable
  drafter: Drafter,
) -> tuple[Any, Cache]:
  """Runs the narrowest pass that holds the drafts of every row, then `then`.

  `then` gets the output of the pass and the drafts that it covers. Its result
  must have the same shapes for all widths. Returns that result, and the cache
  after the pass. For a tree, only the path that `path_of` finds in that result
  is appended to a `Readable` model's cache, because moving it afterwards would
  copy the whole cache on a CPU.
  """
  inputs = jnp.concatenate(
    [_pending(state), jnp.maximum(draft.tokens, 0)], axis=1
  )
  num_drafts, of_passes = draft.tokens.shape[1], widths(model, drafter)
  if draft.parents is not None:
    _check_trees(params, state, draft, inputs, model)

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
    return then(output, drafts.first(draft, width)), new

  is_chain = draft.parents is None
  if len(of_passes) == 1 and (is_chain or not _is_readable(model)):
    return of_first(num_drafts, model.apply)

  def read(width):
    found, new = of_first(width, model.read)
    return found, model.widen(new, num_drafts + 1)

  needed = jnp.max(jnp.where(state.done, 0, drafts.width(draft)))
  found, new = jax.lax.switch(
    jnp.sum(needed > jnp.asarray(of_passes)),
    [functools.partial(read, width) for width in of_passes],
  )
  path = path_of(found)
  of_tree = () if path is None else (path,)
  return found, model.append(state.cache, new, *of_tree)


def _check_trees(params, state, draft, inputs, model) -> None:
  """Raises ValueError if the model takes a tree's shape and ignores it."""
  read, keep = 'apply', 'commit'
  if _is_readable(model):
    read, keep = 'read', 'append'
  pass_over = lambda parents: getattr(model, read)(
    params['target'], inputs, state.cache, parents=parents
  )
  reads_shape, (_, new) = dependence.trace(pass_over, draft.parents)
  path = jnp.zeros((len(inputs), inputs.shape[1]), jnp.int32)
  if _is_readable(model):
    kept = lambda path, new: model.append(state.cache, new, path)
  else:
    kept = lambda path, new: model.commit(new, state.length, path)
  moves_path, _ = dependence.trace(kept, path, new)
  for name, argument, is_used in (
    (read, 'parents', reads_shape),
    (keep, 'path', moves_path),
  ):
    if not is_used:
      raise ValueError(
        f'{type(model).__name__}.{name} takes {argument} and ignores it, so '
        'that a tree would be read as a chain: compute with it, or leave it '
        'out of the arguments and draft chains'
      )


def _pad(tree: Any, missing: int) -> Any:
  """Pads arrays [B, n, ...] with `missing` zeros along their second axis."""
  none = (0, 0)
  return jax.tree.map(
    lambda x: jnp.pad(x, (none, (0, missing), *(none,) * (x.ndim - 2))), tree
  )


def widths(model: Model, drafter: Drafter) -> tuple[int, ...]:
  """Returns the numbers of drafts for which a pass is compiled, ascending.

  A model without `types.Readable.read` has only the widest pass, because each
  of several passes would copy its cache.
  """
  if _is_readable(model):
    return drafter.widths
  return (drafter.num_draft_tokens,)


def _is_readable(model) -> bool:
  """Returns whether the model is a `types.Readable`."""
  return hasattr(model, 'read')


def judge(
  state: DecodeState, draft: Draft, target_probs: Array, verify: Verifier
) -> Verdict:
  """Returns the verdict [B] on the draft under target_probs [B, N + 1, V]."""
  keys = _round_keys(state)
  if verify.positional:
    positions = state.length[:, None] + jnp.arange(target_probs.shape[1])
    position_keys = jax.vmap(streams.position_key, (None, 0))
    keys = jax.vmap(position_keys)(state.key, positions)
  return jax.vmap(verify)(keys, draft, target_probs)


def commit(
  cache: Cache,
  before: Array,
  count: Array | int,
  path: Array | None,
  *,
  model: Model,
) -> Cache:
  """Keeps the first `count` tokens of a pass or, for a tree, of the path.

  Args:
    cache: from `score` with the same path.
    before: [B] int32, the tokens before the pass.
    count: [B] int32, how many of the pass to keep.
    path: see `score`.
    model: the target.
  """
  if path is None or _is_readable(model):  # appended as a chain
    return model.commit(cache, before + count)
  return model.commit(cache, before + count, before[:, None] + path)


def _pending(state) -> Array:
  """Returns the last token of each row, [B, 1], which no cache holds yet."""
  return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)


def _target_probs(state, draft, logits):
  """Turns logits after the first n nodes into distributions [B, n, V]."""
  prefixes = drafts.prefixes(draft, logits.shape[1])
  return jax.vmap(_warp(state), in_axes=1, out_axes=1)(logits, prefixes)


def _round_keys(state):
  return jax.vmap(streams.round_key)(state.key, state.round)


def _warp(state) -> Warp:
  sampling = emission_lib.settings(state)
  is_greedy = jnp.all(sampling.temperature == 0)
  warp = jax.vmap(sampling_lib.warp, in_axes=(0, 0, 0, 0, None))
  return lambda logits, drafted: warp(
    sampling, state.counts, logits, drafted, is_greedy
  )


def _path(draft, verdict) -> Array | None:
  """Returns the pending and the kept nodes, [B, P + 1]; None for a chain."""
  if draft.parents is None:
    return None
  return jnp.pad(verdict.path, ((0, 0), (1, 0)))


def _take_nodes(x, path):
  """Takes the nodes path [B, n] from x [B, N + 1, ...]."""
  return jnp.take_along_axis(
    x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1
  )


def _at_nodes(tokens, path, num_nodes):
  """Returns which of tokens [B, P + 1] follows each node of a path: [B, n]."""
  is_at = path[:, None] == jnp.arange(num_nodes)[:, None]
  return jnp.take_along_axis(tokens, jnp.argmax(is_at, axis=2), axis=1)


def _tally(histogram, index, done):
  one = jax.nn.one_hot(index, histogram.shape[1], dtype=histogram.dtype)
  return jnp.where(done[:, None], histogram, histogram + one)


def _keep_behind(draft: Draft, valid: Array) -> Draft:
  """Keeps the drafts whose ancestors are all `valid` [B, N + 1]."""
  before = valid[:, :-1]
  if draft.parents is not None:
    before = jnp.take_along_axis(valid, draft.parents, axis=1)
  return drafts.cut(draft, before)
