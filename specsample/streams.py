"""Named random streams: which random bits are used for what.

A row's key depends only on the user's key and the row's request id. Each draw
depends only on the row's key, a round or a position, and a purpose. Batch
order, padding, batch size and sharding never matter, and no two purposes share
bits. All functions are for one row.
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
  """Returns the key of one request, wherever in a batch it runs."""
  return jax.random.fold_in(key, request_id)


def round_key(row_key: Array, round: Array) -> Array:
  """Returns the key of one row in one round; the purposes below split it."""
  return jax.random.fold_in(row_key, round)


def position_key(row_key: Array, position: Array) -> Array:
  """Returns the key of one position, shared by drafter and coupled verifier."""
  positions = jax.random.fold_in(row_key, _POSITIONS)
  return jax.random.fold_in(positions, position)


def draft_key(
  round_key: Array, position: Array, node: int | None = None
) -> Array:
  """Returns the key for drafting the token at `position`, or at its `node`."""
  draft = jax.random.fold_in(round_key, _Purpose.DRAFT)
  key = jax.random.fold_in(draft, position)
  return key if node is None else jax.random.fold_in(key, node)


def accept_key(round_key: Array) -> Array:
  """Returns the key for deciding how many draft tokens are kept."""
  return jax.random.fold_in(round_key, _Purpose.ACCEPT)


def residual_key(round_key: Array) -> Array:
  """Returns the key for the token that replaces a rejected draft token."""
  return jax.random.fold_in(round_key, _Purpose.RESIDUAL)


def bonus_key(round_key: Array) -> Array:
  """Returns the key for the token after a fully accepted draft."""
  return jax.random.fold_in(round_key, _Purpose.BONUS)
