"""Draft lengths that promise the most tokens per second, possibly 0."""

from collections.abc import Sequence
import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import settings
from specsample import types
from specsample import widths
from specsample.policies import patience as patience_lib
from specsample.policies import policy
from specsample.types import Array


@types.pytree
class FastestState:
  """Statistics of a row's drafts; the counts decay."""

  reached: Array  # [K] float32, rounds that accepted or rejected draft i
  kept: Array  # [K] float32, rounds that accepted it
  wait: patience_lib.Wait


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Timed(policy.Policy):
  """A policy that compares the costs of rounds.

  Attributes:
    costs: [K + 1], the costs of rounds of 0, 1, ... drafts, in any unit, as
      `choosing.costs` measures them. More are ignored.
    whole_batch: whether the rows of a batch decide together; the costs are then
      of rounds in which every row has that many drafts.
  """

  costs: Sequence[float]
  whole_batch: settings.Flag = False

  def _check(self):
    super()._check()
    object.__setattr__(self, 'costs', widths.check_costs(self.costs))

  def _tokens_a_cost(self, chances, over):
    """Returns E[tokens] / cost [K + 1]; of the batch if that decides.

    `chances` [K] are those that draft i is kept if those before it are.
    """
    kept = jnp.cumprod(chances)
    tokens = 1 + jnp.cumsum(jnp.pad(kept, (1, 0)))
    if self.whole_batch:
      tokens = policy.of_batch(tokens, over)
    return tokens / np.asarray(self.costs[: tokens.size], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping(_Timed):
  """Drafts while E[tokens per round] / cost of the round rises.

  This is DSpark's scheduler. A trained head says how likely each draft token is
  to be kept if those before it are. It says so before the token is drawn, and
  the first token that does not pay ends the draft, so nothing is anticipated.
  The number of tokens that promises the most in hindsight would not be exact:
  it depends on the head's later estimates, and through them on tokens that were
  drawn.

  With `whole_batch` all rows draft the same number of tokens: a round is as
  wide as the longest draft, and a token in every row has to pay together. Then
  a row's number of drafts depends on the other rows; its distribution does not,
  and neither do its tokens at temperature 0.
  """

  reads_token = False

  def init(self, num_draft_tokens):
    widths.check_costs(self.costs, num_draft_tokens)
    return ()

  def passes(self, draft, state, over=False):
    del state
    if draft.parents is not None:
      raise ValueError(
        'EarlyStopping makes chains longer, but the draft is a tree: choose '
        'Budget or ConfidenceProduct'
      )
    promised = self.tokens_a_cost(draft, over)
    return promised[1:] > promised[:-1]

  def tokens_a_cost(self, draft: types.Draft, over: Array) -> Array:
    """Returns E[tokens] / cost [K + 1]; of the batch if that decides."""
    return self._tokens_a_cost(self.confidence(draft), over)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fastest(_Timed, patience_lib.Patient):
  """Maximises E[tokens per round] / cost of the round over K = 0, 1, ...

  E = 1 + a_1 + a_1 a_2 + ..., where a_i is the acceptance rate of draft i, once
  it is reached, in this row so far. (With a single a for all drafts this is the
  formula of Leviathan et al., 2211.17192.) If K = 0 promises the most, the row
  decodes plainly, and tries a draft again after a wait that doubles each time
  the try is in vain.

  In a batch a round is as wide as the longest draft, for all rows: one row that
  drafts makes the others pay. With `whole_batch` all rows draft the same number
  of tokens, the one that maximises the tokens of all rows over the cost of the
  round. Then a row's number of drafts depends on the other rows; its
  distribution does not, and neither do its tokens at temperature 0.

  Attributes:
    prior: the acceptance rate that is assumed before anything is known.
    strength: pseudo-count: weight of the prior, in rounds.
    decay: decay factor of the counts, per round.
    patience, most_patience: see `patience.Patient`.
  """

  # With a strength of 2, two rounds in vain were enough to give up a drafter
  # that yields 2.0 tokens per round. With these values a drafter that is never
  # right costs 2% of the time of 128 tokens (simulated).
  prior: settings.Share = 0.6
  strength: settings.Positive = 8.0
  decay: settings.Share = 0.995
  patience: settings.Count = 32

  def init(self, num_draft_tokens):
    if num_draft_tokens < 1:
      raise ValueError(
        'Fastest chooses a draft length, but the drafter drafts nothing: leave '
        'Fastest out'
      )
    widths.check_costs(self.costs, num_draft_tokens)
    zeros = jnp.zeros(num_draft_tokens, jnp.float32)
    return FastestState(reached=zeros, kept=zeros, wait=self.first_wait())

  def acceptance(self, state: FastestState) -> Array:
    """Returns a [K], the acceptance rate of draft i once it is reached."""
    strength = self.strength
    of_all = (jnp.sum(state.kept) + strength * self.prior) / (
      jnp.sum(state.reached) + strength
    )
    return (state.kept + strength * of_all) / (state.reached + strength)

  def tokens_a_cost(self, state: FastestState, over: Any = False) -> Array:
    """Returns E[tokens] / cost [K + 1]; of the batch if that decides."""
    return self._tokens_a_cost(self.acceptance(state), over)

  def length(self, state, over=False):
    promised = self.tokens_a_cost(state, over)
    best = jnp.argmax(promised)
    tried = 1 + jnp.argmax(promised[1:])
    wait = state.wait.rounds
    if self.whole_batch:
      wait = jax.lax.pmax(jnp.where(over, 0, wait), policy.ROWS)
    is_plain = (best == 0) & (wait > 0)
    return jnp.where(is_plain, 0, jnp.where(best == 0, tried, best))

  def update(self, drafted, kept, state, over=False):
    del drafted
    index = jnp.arange(state.kept.size)
    # A draft that another policy cut counts as asked for and rejected.
    asked = self.length(state, over)
    reached = (index <= kept) & (index < asked)
    fade = lambda old, new: jnp.where(reached, self.decay * old + new, old)
    new = dataclasses.replace(
      state,
      reached=fade(state.reached, 1.0),
      kept=fade(state.kept, index < kept),
    )
    is_plain = jnp.argmax(self.tokens_a_cost(new, over)) == 0
    in_vain = kept == 0
    if self.whole_batch:
      in_vain = policy.of_batch(kept, over) == 0
    wait = self.wait_after(
      state.wait, tried=asked > 0, in_vain=in_vain, is_plain=is_plain
    )
    return dataclasses.replace(new, wait=wait)


@dataclasses.dataclass(frozen=True)
class Fixed(policy.Policy):
  """Asks for `num_draft_tokens` tokens, 0 for plain decoding."""

  num_draft_tokens: Annotated[int, settings.at_least(0)]

  @property
  def most(self) -> int:
    return self.num_draft_tokens

  def length(self, state, over):
    del state, over
    return jnp.int32(self.num_draft_tokens)
