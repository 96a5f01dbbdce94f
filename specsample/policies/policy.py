"""The protocol of policies, which decide how much of a draft is verified.

Everything is for one sequence. The output stays exact if a decision anticipates
nothing: whether a draft is verified may depend on the tokens before it and on
what the drafter knew when it drew it, but not on the token that was drawn.
"""

from typing import Any, Protocol

from specsample.types import Array, Draft

# A pytree of arrays [] or [n].
State = Any
# The axis of the batch's rows, for a policy that decides for all of them.
ROWS = 'rows'


class Policy(Protocol):
  """A filter of drafts, a rule for their number, or both.

  Implementations are frozen dataclasses of static configuration.
  """

  @property
  def reads_token(self) -> bool:
    """Whether `passes` of a draft depends on its own token.

    If so, it decides on the drafts after it. For a point mass, which can only
    be one token, it decides on the draft itself.
    """

  @property
  def most(self) -> int | None:
    """The largest `length` that it ever asks for; None if there is no limit."""

  def init(self, num_draft_tokens: int) -> State:
    """Returns the state before the first round, for a drafter of K tokens."""

  def length(self, state: State, over: Array) -> Array | None:
    """Returns how many tokens to draft next, [] int32; None for all.

    For a tree it is the depth. A number above K counts as K. `over` [] bool
    marks a row that emits no more tokens and does not count.
    """

  def passes(self, draft: Draft, state: State, over: Array) -> Array | None:
    """Returns which drafts pass, [N] bool; None for all.

    A draft is verified if it and all drafts on the way to it pass. The result
    for a draft may not depend on the drafts after it.

    Raises:
      ValueError: the policy is not exact for the draft's kind, or the draft
        lacks what it reads.
    """

  def note(self, draft: Draft, state: State) -> State:
    """Returns the state with what `update` is to know of the draft.

    The draft is the one that will be verified, after all policies have cut it.
    It is not called in a round in which nothing is drafted.
    """

  def update(
    self, drafted: Array, kept: Array, state: State, over: Array
  ) -> State:
    """Returns the state after a round.

    `drafted` and `kept` [] int32 count the round's drafts. The result for a row
    that is `over`, [] bool, is not read.
    """


class Filter:
  """Defaults for a `Policy` that has no state and asks for no length."""

  @property
  def most(self) -> int | None:
    return None

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return ()

  def length(self, state, over):
    del state, over

  def note(self, draft, state):
    del draft
    return state

  def update(self, drafted, kept, state, over):
    del drafted, kept, over
    return state


class Length:
  """Defaults for a `Policy` that reads no draft."""

  reads_token = False

  @property
  def most(self) -> int | None:
    return None

  def passes(self, draft, state, over=False):
    del draft, state, over

  def note(self, draft, state):
    del draft
    return state


def signals_of(draft: Draft, policy: Any) -> Any:
  """Returns what the drafter says about its drafts.

  Raises:
    ValueError: the drafter gives no signals.
  """
  if draft.signals is None:
    raise ValueError(
      f'{type(policy).__name__} reads Draft.signals, but the drafter gives no '
      'signals: choose a drafter with probabilities, or leave the policy out'
    )
  return draft.signals
