"""Drafts by copying what followed the same words before.

Prompt lookup (Saxena, 2023) over the longest matching suffix; no parameters.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample.drafters import settings
from specsample.drafters import stateless
from specsample.types import Array, Draft, DraftLaw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram(stateless.Stateless):
  """Continues the latest occurrence of the longest repeated suffix.

  A suffix of at most `max_ngram` tokens is compared; without an earlier
  occurrence of at least `min_ngram` of them nothing is drafted. A copy that
  reaches the end of the sequence goes on into its own draft.
  """

  num_draft_tokens: int
  max_ngram: int = 4
  min_ngram: int = 2

  def __post_init__(self):
    """Refuses an empty draft and an empty range of lengths."""
    settings.check_num_draft_tokens(self.num_draft_tokens)
    if not 1 <= self.min_ngram <= self.max_ngram:
      raise ValueError(
        f'min_ngram is {self.min_ngram} and max_ngram {self.max_ngram}: they '
        'must satisfy 1 <= min_ngram <= max_ngram'
      )

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`."""
    del params, draw, warp
    drafted = jax.vmap(self._look_up)(tokens, length)
    return Draft(tokens=drafted, probs=None, law=DraftLaw.POINT_MASS), state

  def _look_up(self, tokens: Array, length: Array) -> Array:
    positions = jnp.arange(tokens.size)
    # matched[e]: how many tokens before position e equal the suffix.
    matched = jnp.zeros(tokens.size, jnp.int32)
    agrees = (positions > 0) & (positions < length)
    for back in range(1, self.max_ngram + 1):
      earlier = jnp.roll(tokens, back)
      agrees &= (positions >= back) & (earlier == tokens[length - back])
      agrees &= length > back
      matched += agrees
    longest = jnp.max(matched)
    start = jnp.max(jnp.where(matched == longest, positions, 0))
    period = jnp.maximum(length - start, 1)
    copied = tokens[start + jnp.arange(self.num_draft_tokens) % period]
    return jnp.where(longest >= self.min_ngram, copied, -1)
