"""Drafting what the host wrote into the state before the round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample import types
from specsample.drafter import Drafter
from specsample.drafters import fields
from specsample.types import Array, ArrayLike, DecodeState, Draft, DraftKind


@types.pytree
class GivenState:
  """The next draft."""

  tokens: Array  # [B, K] int32, -1 after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(Drafter):
  """A drafter that proposes up to K given tokens per row, once.

  Without given tokens it drafts nothing. A point mass: the given tokens may
  depend on the tokens so far, but on nothing that the target will draw.
  """

  num_draft_tokens: fields.DraftLength

  @property
  def widths(self) -> tuple[int, ...]:
    """See `Drafter`: a round may be given no tokens."""
    return (0, self.num_draft_tokens)

  def give(self, state: DecodeState, drafts: ArrayLike) -> DecodeState:
    """Returns the state between two rounds, with the drafts of the next one.

    Args:
      state: from `prefill` or `advance`.
      drafts: [B, K] integers, ids of the target, -1 after the last of a row. A
        draft ends at the first id that the target does not have.

    Raises:
      ValueError: the drafts have another shape or are not integers.
    """
    shape = (state.length.shape[0], self.num_draft_tokens)
    given = np.asarray(jax.device_get(drafts))
    with np.errstate(invalid='ignore'):  # for NaN
      tokens = given.astype(np.int32)
    is_ids = given.dtype.kind in 'iu' and np.array_equal(tokens, given)
    if given.shape != shape or not is_ids:
      raise ValueError(
        f'drafts are {given.dtype} of shape {given.shape}: give int32 token '
        f'ids of shape {shape}, one row per row of the state, with -1 after '
        'the last draft token'
      )
    placed = sharding.place({'tokens': tokens}, {'tokens': ('batch', None)})
    return dataclasses.replace(state, draft=GivenState(**placed))

  def init(self, params, batch_size, max_length):
    del params, max_length
    return self._nothing(batch_size)

  def propose(self, params, draw, warp, tokens, length, state):
    del params, draw, warp, length
    draft = Draft(tokens=state.tokens, probs=None, kind=DraftKind.POINT_MASS)
    return draft, self._nothing(tokens.shape[0])

  def pause(self, params, tokens, length, state):
    """See `Drafter`: the given tokens were for this round."""
    del params, length, state
    return self._nothing(tokens.shape[0])

  def _nothing(self, batch_size):
    shape = (batch_size, self.num_draft_tokens)
    zeros = sharding.zeros(shape, jnp.int32, 'batch', None)
    return GivenState(tokens=zeros - 1)
