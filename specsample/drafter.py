"""What a drafter is to the decoding loop."""

import abc
from collections.abc import Sequence
from typing import Any

from specsample import settings
from specsample.types import (
  Array,
  Draft,
  DrafterState,
  Draw,
  ModelOutput,
  Params,
  Verdict,
  Warp,
)


class Drafter(settings.Settings, abc.ABC):
  """A source of drafts, of up to `num_draft_tokens` tokens per row and round.

  Subclasses are frozen dataclasses of static configuration and work on a whole
  batch. They define `num_draft_tokens` and `propose`, and whatever else differs
  from the defaults, which are those of a drafter that reads only the text so
  far. `params` is the whole tree {'target': ..., 'drafter': ...}, so a drafter
  may read the target's parameters. All leaves of the state have the batch axis
  first.

  A drafter that drafts token by token is a `drafters.steps.Steps`.
  """

  @settings.default
  def num_draft_tokens(self) -> int:
    """K, or N for a tree; at least 0."""
    raise TypeError(
      f'{type(self).__name__} has no num_draft_tokens: declare how many tokens '
      'it drafts at most'
    )

  @settings.default
  def depth(self) -> int:
    """The most draft tokens that a round can keep: on a chain all K."""
    return self.num_draft_tokens

  @settings.default
  def widths(self) -> tuple[int, ...]:
    """Increasing numbers of draft tokens, of which the last is K.

    In each round the target reads the first of them that holds the drafts of
    all rows. A drafter that often drafts fewer than K tokens should have
    several.
    """
    return (self.num_draft_tokens,)

  @settings.default
  def topology(self) -> Any:
    """The `tree.Topology` of all drafts; None for chains and other trees."""
    return None

  @settings.default
  def feature_layers(self) -> tuple[Any, ...]:
    """The target's layers whose outputs the drafter reads.

    They may be `KeysAndValues` if the target is a `Transformer`.
    """
    return ()

  @settings.default
  def vocab_size(self) -> int | None:
    """The V that the drafter was made for; None if it fits any target."""
    return None

  @settings.default
  def reads_logits(self) -> bool:
    """Whether `observe` reads the target's logits."""
    return False

  @settings.default
  def policies(self) -> Sequence[Any]:
    """The policies that decide how much is drafted (`drafters.Adaptive`)."""
    return ()

  @settings.default
  def stops_early(self) -> bool:
    """Whether it has `propose_while` (`drafters.steps.Steps`)."""
    return False

  @settings.default
  def can_pause(self) -> bool:
    """Whether `pause` may replace `propose` in any round."""
    return True

  def init(
    self, params: Params, batch_size: int, max_length: int
  ) -> DrafterState:
    """Returns the state before any token; by default there is none."""
    del params, batch_size, max_length
    return ()

  def observe(
    self,
    params: Params,
    tokens: Array,
    count: Array,
    output: ModelOutput,
    verdict: Verdict | None,
    state: DrafterState,
  ) -> DrafterState:
    """Takes in tokens that the target has read.

    Args:
      params: the whole tree of parameters.
      tokens: [B, T] int32. A prompt comes in chunks, without its last token,
        which stays pending. After a round they are the pending token and the
        drafts (of a tree: those of the accepted path). The drafts may have been
        another drafter's (`drafters.Either`).
      count: [B] int32, how many of the tokens stay; they follow those that were
        taken in before. 0 in rows that are done.
      output: the target's for all T tokens.
      verdict: of the round; None for a part of a prompt. Its `next_token` is
        pending now, unless the row has stopped.
      state: from the previous call.
    """
    del params, tokens, count, output, verdict
    return state

  @abc.abstractmethod
  def propose(
    self,
    params: Params,
    draw: Draw,
    warp: Warp,
    tokens: Array,
    length: Array,
    state: DrafterState,
  ) -> tuple[Draft, DrafterState]:
    """Drafts tokens to follow the first length [B] of tokens [B, S].

    The last of these is pending: the target has not read it yet.
    """

  def pause(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """Returns the state of a round without drafts, in place of `propose`.

    `resume` is called before the next `propose`; each of the two may leave work
    to the other. The defaults are right for a drafter that learns all it needs
    in `observe`.
    """
    del params, tokens, length
    return state

  def resume(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> DrafterState:
    """Returns the state as if no round had been left out."""
    del params, tokens, length
    return state

  def with_most_kept(self, most_kept: int) -> 'Drafter':
    """Returns the drafter for rounds that keep up to that many drafts.

    They may be more than its own K where another drafter's are verified too.
    """
    del most_kept
    return self

  def with_store(self, params: Params, name: str, store: Any) -> Params:
    """Returns the whole tree of parameters with a store under that name.

    Raises:
      ValueError: the drafter looks up nothing in stores.
    """
    raise ValueError(
      f'history is given, but {type(self).__name__} does not use one: draft '
      'with Suffix or Either, or leave the history out'
    )
