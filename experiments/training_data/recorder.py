"""A drafter that records the target's hidden vectors for training."""

import dataclasses

import jax.numpy as jnp

from specsample import drafters
from specsample import sharding
from specsample import types
from specsample.models import cache as cache_lib
from specsample.types import Array


@types.pytree
class Recorded:
  """The target's final hidden vectors of the tokens before the pending one."""

  hidden: Array  # [B, S, D] bfloat16
  length: Array  # [B] int32, the number of recorded vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(drafters.NoDraft):
  """A drafter that never drafts; its state is a `Recorded` of vectors [dim]."""

  dim: int

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    del params
    return Recorded(
      hidden=sharding.zeros(
        (batch_size, max_length, self.dim), jnp.bfloat16, 'batch', None, None
      ),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `types.Drafter`: keeps the vectors of the tokens that stay."""
    del params, tokens, verdict
    hidden = output.hidden.astype(state.hidden.dtype)
    written = cache_lib.write(state.hidden, hidden, state.length)
    return Recorded(hidden=written, length=state.length + count)
