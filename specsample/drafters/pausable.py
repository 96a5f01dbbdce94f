"""Drafters that can be left out of a round without losing anything."""

from typing import Any, Protocol

from specsample.types import Array, Drafter, DrafterState, Params


class Pausable(Drafter, Protocol):
  """A drafter that need not draft in every round.

  In a round without drafts `pause` is called instead of `propose`, and `resume`
  is called before the next `propose`. Each of the two may leave work to the
  other.
  """

  def pause(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """Returns the state for a round without drafts; see `Drafter.propose`."""

  def resume(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """Returns the state as if no round had been left out."""


class NothingMissed:
  """`pause` and `resume` for drafters that learn all they need in `update`."""

  def pause(self, params, tokens, length, state):
    """See `Pausable`."""
    del params, tokens, length
    return state

  def resume(self, params, tokens, length, state):
    """See `Pausable`."""
    del params, tokens, length
    return state


def check(drafter: Any) -> None:
  """Raises ValueError unless the drafter can be left out of a round."""
  if not (hasattr(drafter, 'pause') and hasattr(drafter, 'resume')):
    raise ValueError(
      f'{type(drafter).__name__} has no pause and resume, so it cannot sit out '
      'a round: add the methods of drafters/pausable.py'
    )
