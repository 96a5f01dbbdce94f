"""No drafter: K = 0, autoregressive decoding in the same loop.

Every baseline uses this drafter, so that a speedup compares like with like.
"""

import dataclasses

import jax.numpy as jnp

from specsample import sharding
from specsample.drafter import Drafter
from specsample.types import Draft, DraftKind


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
  """A drafter that proposes nothing; each round emits one target token."""

  num_draft_tokens = 0

  def propose(self, params, draw, warp, tokens, length, state):
    del params, draw, warp, length
    empty = sharding.zeros((tokens.shape[0], 0), jnp.int32, 'batch', None)
    return Draft(tokens=empty, probs=None, kind=DraftKind.POINT_MASS), state
