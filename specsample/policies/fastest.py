"""The draft length that promises the most tokens per second, possibly 0."""

from collections.abc import Sequence
import dataclasses
from typing import Any

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
class Fastest(policy.Policy):
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
    costs: [K + 1], the costs of rounds of 0, 1, ... drafts, in any unit, as
      `choosing.costs` measures them. More are ignored.
    prior: the acceptance rate that is assumed before anything is known.
    strength: pseudo-count: weight of the prior, in rounds.
    decay: decay factor of the counts, per round.
    patience: rounds until the first new try.
    most_patience: upper bound of that wait as it doubles, in rounds.
    whole_batch: whether the rows of a batch decide together; the costs are then
      of rounds in which every row has that many drafts.
  """

  costs: Sequence[float]
  # With a strength of 2, two rounds in vain were enough to give up a drafter
  # that yields 2.0 tokens per round. With these values a drafter that is never
  # right costs 2% of the time of 128 tokens (simulated).
  prior: settings.Share = 0.6
  strength: settings.Positive = 8.0
  decay: settings.Share = 0.995
  patience: settings.Count = 32
  most_patience: settings.Count = 256
  whole_batch: settings.Flag = False

  def _check(self):
    object.__setattr__(self, 'costs', widths.check_costs(self.costs))
    patience_lib.check(self.patience, self.most_patience)

  def init(self, num_draft_tokens):
    if num_draft_tokens < 1:
      raise ValueError(
        'Fastest chooses a draft length, but the drafter drafts nothing: leave '
        'Fastest out'
      )
    widths.check_costs(self.costs, num_draft_tokens)
    zeros = jnp.zeros(num_draft_tokens, jnp.float32)
    return FastestState(
      reached=zeros, kept=zeros, wait=patience_lib.init(self.patience)
    )

  def acceptance(self, state: FastestState) -> Array:
    """Returns a [K], the acceptance rate of draft i once it is reached."""
    strength = self.strength
    of_all = (jnp.sum(state.kept) + strength * self.prior) / (
      jnp.sum(state.reached) + strength
    )
    return (state.kept + strength * of_all) / (state.reached + strength)

  def tokens_a_cost(self, state: FastestState, over: Any = False) -> Array:
    """Returns E[tokens] / cost [K + 1]; of the batch if that decides."""
    kept = jnp.cumprod(self.acceptance(state))
    tokens = 1 + jnp.cumsum(jnp.pad(kept, (1, 0)))
    if self.whole_batch:
      tokens = jax.lax.psum(jnp.where(over, 0, tokens), policy.ROWS)
    return tokens / np.asarray(self.costs[: tokens.size], np.float32)

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
      in_vain = jax.lax.psum(jnp.where(over, 0, kept), policy.ROWS) == 0
    wait = patience_lib.update(
      state.wait,
      tried=asked > 0,
      in_vain=in_vain,
      is_plain=is_plain,
      patience=self.patience,
      most_patience=self.most_patience,
    )
    return dataclasses.replace(new, wait=wait)
