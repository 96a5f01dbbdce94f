"""A drafter with a head for each of the next tokens, run all at once.

Cai et al., 2401.10774 (Medusa), as a chain.
"""

import dataclasses

from flax import nnx
import jax.numpy as jnp

from specsample.drafters import heads
from specsample.drafters import steps


class _Network(nnx.Module):
  def __init__(self, config, keys):
    del keys  # every head begins as the identity
    self.heads = nnx.List(
      [
        heads.Head(config, config.num_layers)
        for _ in range(config.num_draft_tokens)
      ]
    )
    self.vocabulary = heads.vocabulary(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(steps.OnePass, heads.Heads):
  """A drafter whose heads see none of the draft tokens.

  Head i draws draft token i. The K products with the target's unembedding are
  computed as one.
  """

  _network = _Network

  def vectors(self, params, tokens, hidden, begins=None):
    del tokens, begins
    rows = hidden.reshape(-1, hidden.shape[-1])
    return [
      head.finish(rows).reshape(hidden.shape)
      for head in self.merge(params).heads
    ]

  def slots(self, params, tokens, length, state):
    del length
    vectors = self.vectors(params, tokens, state.hidden[:, None])
    if not self.own_unembedding:
      return self.logits(params, jnp.concatenate(vectors, axis=1)), state
    of_heads = [self.head_logits(params, i, x) for i, x in enumerate(vectors)]
    return jnp.concatenate(of_heads, axis=1), state
