"""Drafting on as long as the next draft token promises more tokens per second.

DSpark's scheduler, which stops at the first token that does not pay.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import settings
from specsample import types
from specsample import widths
from specsample.policies import policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping(policy.Policy):
  """Drafts while E[tokens per round] / cost of the round rises.

  A trained head says how likely each draft token is to be kept if those before
  it are. It says so before the token is drawn, and the first token that does
  not pay ends the draft, so nothing is anticipated. The number of tokens that
  promises the most in hindsight would not be exact: it depends on the head's
  later estimates, and through them on tokens that were drawn.

  With `whole_batch` all rows draft the same number of tokens: a round is as
  wide as the longest draft, and a token in every row has to pay together. Then
  a row's number of drafts depends on the other rows; its distribution does not,
  and neither do its tokens at temperature 0.

  Attributes:
    costs: [K + 1], the costs of rounds of 0, 1, ... drafts, in any unit, as
      `choosing.costs` measures them. More are ignored.
    whole_batch: whether the rows of a batch decide together; the costs are then
      of rounds in which every row has that many drafts.
  """

  costs: Sequence[float]
  whole_batch: settings.Flag = False
  reads_token = False

  def _check(self):
    object.__setattr__(self, 'costs', widths.check_costs(self.costs))

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

  def tokens_a_cost(self, draft: types.Draft, over: types.Array) -> types.Array:
    """Returns E[tokens] / cost [K + 1]; of the batch if that decides."""
    kept = jnp.cumprod(self.confidence(draft))
    tokens = 1 + jnp.cumsum(jnp.pad(kept, (1, 0)))
    if self.whole_batch:
      tokens = jax.lax.psum(jnp.where(over, 0, tokens), policy.ROWS)
    return tokens / np.asarray(self.costs[: tokens.size], np.float32)
