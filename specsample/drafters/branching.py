"""Drafters that can continue from several drafts at once, as trees need."""

from typing import Any, Protocol

import jax.numpy as jnp

from specsample import sharding
from specsample.types import Array, Drafter, DrafterState, Params


class Branching(Drafter, Protocol):
  """A drafter that can continue from several drafts at once.

  The nodes that it continues from are numbered in the order that `grow` gets
  them; 0 is the pending token.
  """

  def begin(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> tuple[Array, Any]:
    """Returns logits [B, 1, V'] after the pending token, and `grow`'s carry."""

  def grow(
    self, params: Params, tokens: Array, parents: Array, carry: Any
  ) -> tuple[Array, Any]:
    """Returns logits [B, n, V'] after n more nodes, and the next carry.

    Args:
      params: the whole tree of parameters.
      tokens: [B, n], tokens of the new nodes, all one level below the previous.
      parents: [B, W - 1], the parents of all nodes so far, the new ones last.
      carry: from the previous call of `begin` or `grow`.
    """

  def end(self, carry: Any, state: DrafterState) -> DrafterState:
    """Returns the state as `propose` leaves it."""

  def target_ids(self, params: Params, ids: Array) -> Array:
    """Maps ids [...] of the V' tokens that are drafted to the target's ids."""

  def widen(self, params: Params, logits: Array) -> Array:
    """Expands logits [..., V'] to [..., V]: -inf for tokens never drafted."""


def check(drafter: Any) -> None:
  """Raises ValueError unless the drafter can draft trees."""
  if not hasattr(drafter, 'grow'):
    raise ValueError(
      'a tree continues several drafts at once, which '
      f'{type(drafter).__name__} cannot do: make the tree with Chain, '
      'DraftModel, Eagle, Eagle3, Hydra, MTP, Medusa, Skip or TLI'
    )


def check_siblings(count: int, logits: Array) -> None:
  """Raises ValueError unless logits [..., V'] have at least `count` tokens."""
  if count > logits.shape[-1]:
    raise ValueError(
      f'the tree has {count} siblings, but the drafter drafts only '
      f'{logits.shape[-1]} different tokens: make the tree narrower, or use a '
      'drafter with a larger draft_vocab_size'
    )


class OverBranches:
  """The parts of `types.Drafter` that are passed on to another drafter."""

  drafter: Any  # a Branching

  @property
  def feature_layers(self) -> tuple[int, ...]:
    """See `types.Drafter`."""
    return self.drafter.feature_layers

  @property
  def vocab_size(self) -> int | None:
    """See `types.Drafter`."""
    return self.drafter.vocab_size

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    return self.drafter.init(params, batch_size, max_length)

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`."""
    return self.drafter.extend(params, tokens, count, output, state)

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`."""
    return self.drafter.update(params, tokens, length, output, verdict, state)

  def pause(self, params, tokens, length, state):
    """See `pausable.Pausable`."""
    return self.drafter.pause(params, tokens, length, state)

  def resume(self, params, tokens, length, state):
    """See `pausable.Pausable`."""
    return self.drafter.resume(params, tokens, length, state)


def for_all(parents: Any, batch_size: int) -> Array:
  """Broadcasts parents to all rows: [B, n]."""
  row = jnp.asarray(parents, jnp.int32)
  rows = jnp.broadcast_to(row, (batch_size, row.size))
  return sharding.constrain(rows, 'batch', None)
