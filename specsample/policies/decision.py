"""Joint decisions of several policies on the drafts of a whole batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sharding
from specsample.policies import policy as policy_lib
from specsample.types import Array, Draft, DraftKind

Policies = Sequence[policy_lib.Policy]
# One state for each policy, leaves [B, ...].
States = tuple[policy_lib.State, ...]


def wanted(
  policies: Policies, states: States, over: Array, depth: int
) -> Array:
  """Returns how many drafts each row asks for, [B], at most `depth`.

  `over` [B] bool marks rows that emit no more tokens.
  """
  least = jnp.full(over.shape, depth, jnp.int32)
  least = sharding.constrain(least, 'batch')
  for policy, state in zip(policies, states, strict=True):
    asked: Any = jax.vmap(policy.length, axis_name=policy_lib.ROWS)(state, over)
    if asked is not None:
      least = jnp.minimum(least, asked.astype(jnp.int32))
  return jnp.maximum(least, 0)


def decide(
  policies: Policies, states: States, wanted: Array, over: Array, draft: Draft
) -> tuple[Array, Array]:
  """Returns which drafts stay, and after which more may come: [B, N] bool.

  `wanted` [B] is how many drafts each row asks for; `over` as for `wanted`.
  """
  depths = drafts.depths(draft)
  stays = jnp.broadcast_to(depths <= wanted[:, None], draft.tokens.shape)
  is_open = depths < wanted[:, None]
  for policy, state in zip(policies, states, strict=True):
    of_rows = jax.vmap(policy.passes, axis_name=policy_lib.ROWS)
    passes: Any = of_rows(draft, state, over)
    if passes is None:
      continue
    is_open &= passes
    if policy.reads_token and draft.kind is not DraftKind.POINT_MASS:
      passes = drafts.of_parents(draft, passes)
    stays &= passes
  stays = drafts.all_on_the_way(draft, stays)
  return stays, stays & drafts.all_on_the_way(draft, is_open)


def note(policies: Policies, states: States, draft: Draft) -> States:
  """Returns the states with what policies note of the draft as it is cut."""
  return tuple(
    jax.vmap(policy.note, axis_name=policy_lib.ROWS)(draft, state)
    for policy, state in zip(policies, states, strict=True)
  )


def update(
  policies: Policies, states: States, drafted: Array, kept: Array, over: Array
) -> States:
  """Returns the states after a round.

  `drafted` and `kept` [B] int32 count the round's drafts. `over` [B] bool marks
  rows that had ended before and emitted nothing in it.
  """
  return tuple(
    jax.vmap(policy.update, axis_name=policy_lib.ROWS)(
      drafted, kept, state, over
    )
    for policy, state in zip(policies, states, strict=True)
  )
