"""The base of policies, which decide how much of a draft is verified.

Everything is for one sequence. The output stays exact if a decision anticipates
nothing: whether a draft is verified may depend on the tokens before it and on
what the drafter knew when it drew it, but not on the token that was drawn.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import settings
from specsample.types import Array, Draft, Signals

# A pytree of arrays [] or [n].
State = Any
# The axis of the batch's rows, for a policy that decides for all of them.
ROWS = 'rows'


class Policy(settings.Settings):
  """A filter of drafts, a rule for their number, or both.

  Subclasses are frozen dataclasses of static configuration. The defaults are
  those of a policy that has no state and lets everything pass.

  Attributes:
    reads_token: whether `passes` of a draft depends on its own token. If so, it
      decides on the drafts after it. For a point mass, which can only be one
      token, it decides on the draft itself. Only a policy that defines `passes`
      needs it, and must say: there is no safe default.
  """

  reads_token: ClassVar[bool]

  @property
  def most(self) -> int | None:
    """The largest `length` that it ever asks for; None if there is no limit."""
    return None

  def init(self, num_draft_tokens: int) -> State:
    """Returns the state before the first round, for a drafter of K tokens."""
    del num_draft_tokens
    return ()

  def length(self, state: State, over: Array) -> Array | None:
    """Returns how many tokens to draft next, [] int32; None for all.

    For a tree it is the depth. A number above K counts as K. `over` [] bool
    marks a row that emits no more tokens and does not count.
    """
    del state, over
    return None

  def passes(self, draft: Draft, state: State, over: Array) -> Array | None:
    """Returns which drafts pass, [N] bool; None for all.

    A draft is verified if it and all drafts on the way to it pass. The result
    for a draft may not depend on the drafts after it.

    Raises:
      ValueError: the policy is not exact for the draft's kind, or the draft
        lacks what it reads.
    """
    del draft, state, over
    return None

  def note(self, draft: Draft, state: State) -> State:
    """Returns the state with what `update` is to know of the draft.

    The draft is the one that will be verified, after all policies have cut it.
    It is not called in a round in which nothing is drafted.
    """
    del draft
    return state

  def update(
    self, drafted: Array, kept: Array, state: State, over: Array
  ) -> State:
    """Returns the state after a round.

    `drafted` and `kept` [] int32 count the round's drafts. The result for a row
    that is `over`, [] bool, is not read.
    """
    del drafted, kept, over
    return state

  def signals(self, draft: Draft) -> Signals:
    """Returns what the drafter says about its drafts."""
    if draft.signals is None:
      raise ValueError(
        f'{type(self).__name__} reads Draft.signals, but the drafter gives no '
        'signals: choose a drafter with probabilities, or leave the policy out'
      )
    return draft.signals

  def confidence(self, draft: Draft) -> Array:
    """Returns a trained head's estimate for each draft, [N]."""
    confidence = self.signals(draft).confidence
    if confidence is None:
      raise ValueError(
        f"{type(self).__name__} reads a trained head's confidence, but the "
        'drafter has no such head: draft with DSpark, or choose '
        'LargestProbability'
      )
    return confidence


def of_batch(x: Array | int, over: Array) -> Array:
  """Returns the sum of x [] over the rows that are not done."""
  return jax.lax.psum(jnp.where(over, 0, x), ROWS)


def along(draft: Draft, values: Array) -> Array:
  """Sums values [N] along the path to each node, itself included: [N]."""
  before = drafts.on_the_way(draft)[1:]
  return jnp.sum(jnp.where(before, values, 0), axis=-1)


def ranks(draft: Draft, scores: Array) -> Array:
  """Returns how many nodes score more than each: [N] int32, from scores [N].

  Missing nodes come last. Ties go to the first node, so that a node whose score
  is at most its parent's is never ahead of it.
  """
  scores = jnp.where(draft.tokens >= 0, scores, -jnp.inf)
  number = jnp.arange(scores.size)
  is_better = (scores > scores[:, None]) | (
    (scores == scores[:, None]) & (number < number[:, None])
  )
  return jnp.sum(is_better, axis=1, dtype=jnp.int32)
