"""The target's distributions after a pass, and the rule's verdict on them."""

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import indexing
from specsample import sampling as sampling_lib
from specsample import streams
from specsample import types
from specsample.loop import certified
from specsample.loop import emission
from specsample.loop import passes
from specsample.loop.decoder import Decoder
from specsample.types import (
  Array,
  Cache,
  DecodeState,
  Draft,
  ModelOutput,
  Params,
  Verdict,
  Verifier,
  Warp,
)


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
  # What `DecodeState.records` has, for the accepted drafts and the next token,
  # [B, P + 1] each.
  records: dict[str, Array]


def verify(
  decoder: Decoder, params: Params, state: DecodeState, draft: Draft
) -> tuple[Judged, Array | None, Cache]:
  """Runs the target over a draft, then the rule; see `passes.run`.

  The rule sees only the positions that the pass read, because over a large
  vocabulary a rule costs as much as a layer.
  """

  def judged(output, covered):
    if isinstance(decoder.verify, types.ByChoice):
      output, found = certified.judged(decoder, params, state, covered, output)
    else:
      found = _by_distribution(decoder, state, covered, output)
    probs, valid, verdict, records = found
    path = None
    if covered.parents is not None:
      path = jnp.pad(verdict.path, ((0, 0), (1, 0)))
      take = lambda x: _take_nodes(x, path)
      output, records = jax.tree.map(take, (output, records))
    missing = draft.tokens.shape[1] - covered.tokens.shape[1]
    of_path = missing if path is None else 0  # a path is as long in all passes
    whole = Judged(
      output=passes.pad(output, of_path),
      probs=passes.pad(probs, missing),
      valid=passes.pad(valid, missing),
      verdict=verdict,
      records=passes.pad(records, of_path),
    )
    return whole, path

  return passes.run(decoder, params, state, draft, judged)


def _by_distribution(decoder, state, draft, output) -> tuple:
  """Returns distributions, where there are some, the verdict and records."""
  probs = _target_probs(state, draft, output.logits)
  valid = sampling_lib.is_distribution(probs)
  # A rule looks at all positions at once, so it must see neither NaN nor the
  # drafts that follow a position without a distribution.
  probs = jnp.where(valid[..., None], probs, 0)
  draft = drafts.follow_valid(draft, valid)
  verdict = judge(state, draft, probs, decoder.verify)
  if not state.records:
    return probs, valid, verdict, {}
  logits = output.logits.astype(jnp.float32)
  tokens = emission.tokens(draft, verdict)
  if draft.parents is not None:
    tokens = _at_nodes(tokens, verdict.path, logits.shape[1])
  log_sum_exp = jax.nn.logsumexp(logits, axis=-1)
  records = {
    'log_probs': indexing.pick(logits, tokens) - log_sum_exp,
    'warped_log_probs': jnp.log(indexing.pick(probs, tokens)),
  }
  return probs, valid, verdict, records


def judge(
  state: DecodeState, draft: Draft, target_probs: Array, rule: Verifier
) -> Verdict:
  """Returns the verdict [B] on the draft under target_probs [B, N + 1, V]."""
  keys = round_keys(state)
  if rule.positional:
    positions = state.length[:, None] + jnp.arange(target_probs.shape[1])
    position_keys = jax.vmap(streams.position_key, (None, 0))
    keys = jax.vmap(position_keys)(state.key, positions)
  return jax.vmap(rule)(keys, draft, target_probs)


def round_keys(state: DecodeState) -> Array:
  """Returns the key [B] of each row's round."""
  return jax.vmap(streams.round_key)(state.key, state.round)


def warp(state: DecodeState) -> Warp:
  """Returns the function that applies the rows' sampling settings."""
  sampling = emission.settings(state)
  is_greedy = jnp.all(sampling.temperature == 0)
  of_rows = jax.vmap(sampling_lib.warp, in_axes=(0, 0, 0, 0, None))
  return lambda logits, drafted: of_rows(
    sampling, state.counts, logits, drafted, is_greedy
  )


def _target_probs(state, draft, logits) -> Array:
  """Turns logits after the first n nodes into distributions [B, n, V]."""
  prefixes = drafts.prefixes(draft, logits.shape[1])
  return jax.vmap(warp(state), in_axes=1, out_axes=1)(logits, prefixes)


def _take_nodes(x, path):
  """Takes the nodes path [B, n] from x [B, N + 1, ...]."""
  return jnp.take_along_axis(
    x, path.reshape(*path.shape, *(1,) * (x.ndim - 2)), axis=1
  )


def _at_nodes(tokens, path, num_nodes):
  """Returns which of tokens [B, P + 1] follows each node of a path: [B, n]."""
  path = jnp.pad(path, ((0, 0), (1, 0)))
  is_at = path[:, None] == jnp.arange(num_nodes)[:, None]
  return jnp.take_along_axis(tokens, jnp.argmax(is_at, axis=2), axis=1)
