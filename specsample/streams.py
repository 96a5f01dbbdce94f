"""Named random streams: which bits are spent on what.

A row's key depends on the user's key and the row's request id alone, and each
draw on the row's key, a round or a position, and a purpose. Batch order,
padding, batch size and sharding never enter, and no two purposes share bits.
All functions are for one row.
"""

import enum

import jax

from specsample.types import Array


class _Purpose(enum.IntEnum):
  DRAFT = 0
  ACCEPT = 1
  RESIDUAL = 2
  BONUS = 3


# Rounds count up from 0 in int32, so this index is never a round.
_POSITIONS = 0xFFFFFFFF


def row_key(key: Array, request_id: Array) -> Array:
  """The key of one request, wherever in a batch it runs."""
  return jax.random.fold_in(key, request_id)


def round_key(row_key: Array, round: Array) -> Array:
  """The key of one row in one round; the purposes below split it."""
  return jax.random.fold_in(row_key, round)


def position_key(row_key: Array, position: Array) -> Array:
  """The key of one position, shared by drafter and target (coupled rule)."""
  positions = jax.random.fold_in(row_key, _POSITIONS)
  return jax.random.fold_in(positions, position)


def draft_key(
  round_key: Array, position: Array, node: int | None = None
) -> Array:
  """For drafting the token at `position`, in a tree that of a node."""
  draft = jax.random.fold_in(round_key, _Purpose.DRAFT)
  key = jax.random.fold_in(draft, position)
  return key if node is None else jax.random.fold_in(key, node)


def accept_key(round_key: Array) -> Array:
  """For deciding how many drafts are kept."""
  return jax.random.fold_in(round_key, _Purpose.ACCEPT)


def residual_key(round_key: Array) -> Array:
  """For the token that replaces a rejected draft."""
  return jax.random.fold_in(round_key, _Purpose.RESIDUAL)


def bonus_key(round_key: Array) -> Array:
  """For the token after a draft that was accepted whole."""
  return jax.random.fold_in(round_key, _Purpose.BONUS)
