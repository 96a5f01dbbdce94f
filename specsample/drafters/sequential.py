"""Drafters that draw token by token, with a pass over each before the next."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sharding
from specsample.drafters import signals as signals_lib
from specsample.types import (
  Array,
  Draft,
  Drafter,
  DrafterState,
  DraftKind,
  Draw,
  Params,
  Warp,
)


class Sequential(Drafter, Protocol):
  """A drafter that can stop after any token and save the remaining passes."""

  def first(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> tuple[Array, Any]:
    """Returns logits [B, V] after the pending token, and what `go_on` needs."""

  def go_on(
    self, params: Params, tokens: Array, carry: Any
  ) -> tuple[Array, Any]:
    """Returns logits [B, V] after one more token [B], and the next carry.

    The token is -1 in rows without one. The next carry has the same shapes.
    """

  def end(self, carry: Any, state: DrafterState) -> DrafterState:
    """Returns the state as `propose` leaves it."""


def propose(
  draw: Draw,
  warp: Warp,
  tokens: Array,
  length: Array,
  state: DrafterState,
  *,
  drafter: Sequential,
  params: Params,
) -> tuple[Draft, DrafterState]:
  """See `types.Drafter`: K tokens, K passes."""
  draft_one = _drawn_by(draw, warp, length)
  logits, carry = drafter.first(params, tokens, length, state)
  drafted = _nothing(drafter, tokens.shape[0])

  def body(carry, i):
    logits, drafted, inner = carry
    drafted, *found = draft_one(logits, drafted, i)
    logits, inner = drafter.go_on(params, drafted[:, i], inner)
    return (logits, drafted, inner), found

  last = drafter.num_draft_tokens - 1
  (logits, drafted, carry), found = jax.lax.scan(
    body, (logits, drafted, carry), jnp.arange(last)
  )
  drafted, *of_last = draft_one(logits, drafted, last)
  join = lambda x, y: jnp.swapaxes(jnp.concatenate([x, y[None]]), 0, 1)
  probs, signals = jax.tree.map(join, tuple(found), tuple(of_last))
  draft = Draft(
    tokens=drafted, probs=probs, kind=DraftKind.SAMPLED, signals=signals
  )
  return draft, drafter.end(carry, state)


def propose_while(
  goes_on: Callable[[Draft], tuple[Array, Array]],
  draw: Draw,
  warp: Warp,
  tokens: Array,
  length: Array,
  state: DrafterState,
  *,
  drafter: Sequential,
  params: Params,
) -> tuple[Draft, DrafterState]:
  """Proposes like `propose`, but stops once no row goes on.

  Args:
    goes_on: takes a draft whose first i tokens are drawn; later tokens are -1,
      and their probs and signals are zeros. Returns which tokens stay, [B, K],
      and after which of them more may follow, [B, K]. Neither may depend on
      what is not drawn yet.
    draw, warp, tokens, length, state, params: see `types.Drafter.propose`.
    drafter: drafts K tokens.
  """
  draft_one = _drawn_by(draw, warp, length)
  logits, carry = drafter.first(params, tokens, length, state)
  num_drafts = drafter.num_draft_tokens
  drafted, *of_first = draft_one(logits, _nothing(drafter, tokens.shape[0]), 0)
  room = lambda x: jnp.stack([x] + [jnp.zeros_like(x)] * (num_drafts - 1))
  found = jax.tree.map(room, tuple(of_first))

  def draft_of(drafted, found):
    probs, signals = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    return Draft(
      tokens=drafted, probs=probs, kind=DraftKind.SAMPLED, signals=signals
    )

  def judged(drafted, found, i):
    """Drops token i in rows where it does not stay; also says which go on."""
    stays, is_open = goes_on(draft_of(drafted, found))
    token = jnp.where(stays[:, i], drafted[:, i], -1)
    return drafted.at[:, i].set(token), stays[:, i] & is_open[:, i]

  def cond(carry):
    i, going, *_ = carry
    return (i < num_drafts) & jnp.any(going)

  def body(carry):
    i, going, drafted, found, inner = carry
    logits, inner = drafter.go_on(params, drafted[:, i - 1], inner)
    drafted, *new = draft_one(logits, drafted, i, going)
    write = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
    found = jax.tree.map(write, found, tuple(new))
    drafted, going = judged(drafted, found, i)
    return i + 1, going, drafted, found, inner

  drafted, going = judged(drafted, found, 0)
  _, _, drafted, found, carry = jax.lax.while_loop(
    cond, body, (jnp.ones((), jnp.int32), going, drafted, found, carry)
  )
  draft = drafts.cut(draft_of(drafted, found), drafted >= 0)
  return draft, drafter.end(carry, state)


def _nothing(drafter, batch):
  nothing = jnp.full((batch, drafter.num_draft_tokens), -1, jnp.int32)
  return sharding.constrain(nothing, 'batch', None)


def _drawn_by(draw, warp, length):
  def draft_one(logits, drafted, i, going=None):
    probs = warp(logits, drafted)
    if going is not None:
      probs = jnp.where(going[:, None], probs, 0)
    token = draw(probs, length + i)
    signals = signals_lib.of_tokens(logits, token)
    if going is not None:
      token = jnp.where(going, token, -1)
    return drafted.at[:, i].set(token), probs, signals

  return draft_one
