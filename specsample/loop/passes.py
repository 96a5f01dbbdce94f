"""The target's pass over a draft, and which of its tokens the cache keeps."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from specsample import drafts
from specsample.loop.decoder import Decoder
from specsample.types import (
  Array,
  Cache,
  DecodeState,
  Draft,
  ModelOutput,
  Params,
)

# What a pass gives: anything of the same shapes for all widths, and the nodes
# of a tree that will be kept, [B, P + 1]; None for a chain.
Result = tuple[Any, Array | None]


def pending(state: DecodeState) -> Array:
  """Returns the last token of each row, [B, 1], which no cache holds yet."""
  return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)


def run(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  draft: Draft,
  then: Callable[[ModelOutput, Draft], Result],
) -> tuple[Any, Array | None, Cache]:
  """Runs the narrowest pass that holds the drafts of every row, then `then`.

  The pass covers the first of the decoder's `widths` that does; at width 0 it
  reads the pending token alone. `then` gets its output and the drafts that it
  covers. Returns what `then` does, and the cache after the pass, for `commit`.
  Of a tree, only the path is appended to the cache of a `Readable` model,
  because moving it afterwards would copy the whole cache on a CPU.
  """
  model: Any = decoder.model  # perhaps a Readable
  inputs = jnp.concatenate(
    [pending(state), jnp.maximum(draft.tokens, 0)], axis=1
  )
  num_drafts, widths = draft.tokens.shape[1], decoder.widths
  if draft.parents is not None:
    _check_trees(decoder, params, state, draft, inputs)

  def over_first(width, read: Callable) -> tuple:
    tree = {}
    if draft.parents is not None:
      tree = {'parents': draft.parents[:, :width]}
    output, new = read(
      params['target'],
      inputs[:, : width + 1],
      state.cache,
      features=decoder.drafter.feature_layers,
      **tree,
    )
    return *then(output, drafts.first(draft, width)), new

  is_chain = draft.parents is None
  if len(widths) == 1 and (is_chain or not decoder.is_readable):
    return over_first(num_drafts, model.apply)

  def read(width):
    found, path, new = over_first(width, model.read)
    return found, path, model.widen(new, num_drafts + 1)

  needed = jnp.max(jnp.where(state.done, 0, drafts.width(draft)))
  found, path, new = jax.lax.switch(
    jnp.sum(needed > jnp.asarray(widths)),
    [functools.partial(read, width) for width in widths],
  )
  kept = () if path is None else (path,)
  return found, path, model.append(state.cache, new, *kept)


def score(
  decoder: Decoder,
  params: Params,
  state: DecodeState,
  draft: Draft,
  path: Array | None = None,
) -> tuple[ModelOutput, Cache]:
  """Runs the target over [pending, d_1, ..., d_N], as a round does.

  Args:
    decoder, params, state, draft: as in a round.
    path: [B, P + 1] int32, the nodes of a tree that will be kept, the pending
      token's 0 first; None for a chain.

  Returns:
    The output, padded with zeros to N + 1 positions, and the cache after it.
  """

  def padded(output, covered):
    return pad(output, draft.tokens.shape[1] - covered.tokens.shape[1]), path

  output, _, cache = run(decoder, params, state, draft, padded)
  return output, cache


def commit(
  decoder: Decoder,
  cache: Cache,
  before: Array,
  count: Array | int,
  path: Array | None,
) -> Cache:
  """Keeps the first `count` [B] tokens of a pass or, for a tree, of the path.

  Args:
    decoder: of the pass.
    cache: from `run` or `score`.
    before: [B] int32, the tokens before the pass.
    count: [B] int32, how many of the pass to keep.
    path: from `run`, or as `score` had it.
  """
  if path is None or decoder.is_readable:  # appended as a chain
    return decoder.model.commit(cache, before + count)
  return decoder.model.commit(cache, before + count, before[:, None] + path)


def pad(tree: Any, missing: int) -> Any:
  """Pads arrays [B, n, ...] with `missing` zeros along their second axis."""
  none = (0, 0)
  return jax.tree.map(
    lambda x: jnp.pad(x, (none, (0, missing), *(none,) * (x.ndim - 2))), tree
  )


def _check_trees(decoder, params, state, draft, inputs) -> None:
  """Raises ValueError if the model takes a tree's shape and ignores it."""
  model: Any = decoder.model
  path = jnp.zeros((len(inputs), inputs.shape[1]), jnp.int32)
  if decoder.is_readable:
    read, keep = 'read', 'append'
    over = lambda parents: model.read(
      params['target'], inputs, state.cache, parents=parents
    )
    kept = lambda path, new: model.append(state.cache, new, path)
  else:
    read, keep = 'apply', 'commit'
    over = lambda parents: model.apply(
      params['target'], inputs, state.cache, parents=parents
    )
    kept = lambda path, new: model.commit(new, state.length, path)
  reads_shape, (_, new) = _depends(over, draft.parents)
  moves_path, _ = _depends(kept, path, new)
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


def _depends(function: Callable, argument: Any, *others: Any) -> tuple:
  """Returns whether any result may depend on the first argument, and shapes.

  Each operation of the trace counts as one whose results depend on all that it
  reads. The shapes are those of the results, as of `jax.eval_shape`.
  """
  make = jax.make_jaxpr(function, return_shape=True)
  closed, shapes = make(argument, *others)
  jaxpr = closed.jaxpr
  found = {jaxpr.invars[0]}
  is_found = lambda x: not isinstance(x, core.Literal) and x in found
  for equation in jaxpr.eqns:
    if any(map(is_found, equation.invars)):
      found.update(equation.outvars)
  return any(map(is_found, jaxpr.outvars)), shapes
