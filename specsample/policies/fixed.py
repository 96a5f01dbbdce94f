"""The same number of drafts in every round."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from specsample import settings
from specsample.policies import policy


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
