"""The same number of drafts in every round."""

import dataclasses

import jax.numpy as jnp

from specsample import checks
from specsample.policies import policy


@dataclasses.dataclass(frozen=True)
class Fixed(policy.Length):
  """Asks for `num_draft_tokens` tokens, 0 for plain decoding."""

  num_draft_tokens: int

  def __post_init__(self):
    """Refuses a length below 0."""
    checks.count('num_draft_tokens', self.num_draft_tokens, 0)

  @property
  def most(self) -> int:
    return self.num_draft_tokens

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return ()

  def length(self, state, over):
    del state, over
    return jnp.int32(self.num_draft_tokens)

  def update(self, drafted, kept, state, over):
    del drafted, kept, over
    return state
