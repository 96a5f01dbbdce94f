"""Drafters that may be left out of a round, and lose nothing by it."""

from typing import Any, Protocol

from specsample.types import Array, Drafter, DrafterState, Params


class Pausable(Drafter, Protocol):
  """A drafter that is not asked in every round.

  In a round without drafts `pause` stands for `propose`; before the next
  `propose` comes `resume`. What they need not do is left to the other.
  """

  def pause(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """The state of a round without drafts; arguments as of `propose`."""

  def resume(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """The state as if no round had been left out."""


class NothingMissed:
  """The methods of drafters that learn all they need in `update`."""

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
      f'{type(drafter).__name__} has no pause and resume, and so cannot be '
      'left out of a round: add the methods of drafters/pausable.py'
    )
