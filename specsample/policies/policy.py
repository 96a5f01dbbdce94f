"""What decides how much of a draft is verified, for one sequence.

The output stays exact if a decision anticipates nothing: whether a draft is
verified may follow from the tokens before it and from what the drafter knew
when it drew it, but not from the token that was drawn.
"""

from typing import Any, Protocol

from specsample.types import Array, Draft

# A pytree of arrays [] or [n].
State = Any
# The axis of the rows of a batch, for a policy that decides for all of them.
ROWS = 'rows'


class Policy(Protocol):
  """A filter of drafts, a rule for their number, or both.

  Implementations are frozen dataclasses of static configuration.
  """

  @property
  def reads_token(self) -> bool:
    """Whether `passes` of a draft depends on its own token.

    Then it decides on the drafts behind it. A point mass has one token that it
    can be, and is decided on itself.
    """

  @property
  def most(self) -> int | None:
    """The largest `length` that it ever asks for; None is any number."""

  def init(self, num_draft_tokens: int) -> State:
    """The state before the first round, of a drafter of K tokens."""

  def length(self, state: State, over: Array) -> Array | None:
    """How many tokens to draft in the next round, [] int32; None for all.

    Of a tree how deep it may be. More than K are K. A row that emits nothing
    any more is `over`, [] bool, and does not count.
    """

  def passes(self, draft: Draft, state: State) -> Array | None:
    """Which drafts pass, [N] bool; None for all.

    A draft is verified if it and all on the way to it are. What it says of a
    draft may not depend on those behind it.

    Raises:
      ValueError: the draft is of a law that it is not exact for, or lacks what
        it reads.
    """

  def update(
    self, drafted: Array, kept: Array, state: State, over: Array
  ) -> State:
    """The state after a round of so many drafts, [] int32 both.

    That of a row that is `over`, [] bool, is not read.
    """


class Filter:
  """The parts of a `Policy` that has no state and asks for no length."""

  @property
  def most(self) -> int | None:
    """See `Policy`."""
    return None

  def init(self, num_draft_tokens):
    """See `Policy`."""
    del num_draft_tokens
    return ()

  def length(self, state, over):
    """See `Policy`."""
    del state, over

  def update(self, drafted, kept, state, over):
    """See `Policy`."""
    del drafted, kept, over
    return state


class Length:
  """The parts of a `Policy` that looks at no draft."""

  reads_token = False

  @property
  def most(self) -> int | None:
    """See `Policy`."""
    return None

  def passes(self, draft, state):
    """See `Policy`."""
    del draft, state


def signals_of(draft: Draft, policy: Any) -> Any:
  """What the drafter says of its drafts.

  Raises:
    ValueError: it says nothing.
  """
  if draft.signals is None:
    raise ValueError(
      f'{type(policy).__name__} reads Draft.signals, and the drafter gives '
      'none: choose one with probabilities, or leave the policy out'
    )
  return draft.signals


def check_share(name: str, value: float) -> None:
  """Raises ValueError unless a setting of that name is in [0, 1]."""
  if not 0 <= value <= 1:
    raise ValueError(f'{name} is {value!r}: give a number from 0 to 1')
