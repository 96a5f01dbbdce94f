"""A drafter with a head for each of the next tokens, run all at once.

Cai et al., 2401.10774 (Medusa), as a chain.
"""

import dataclasses

from flax import nnx
import jax.numpy as jnp

from specsample.drafters import heads
from specsample.drafters import steps
from specsample.types import Array, Params


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
class Medusa(heads.Heads):
  """A drafter whose heads see none of the draft tokens.

  Head i draws draft token i. The K products with the target's unembedding are
  computed as one.
  """

  _network = _Network

  def vectors(
    self, params: Params, tokens: Array, hidden: Array
  ) -> list[Array]:
    """See `heads.Heads`; the tokens are not read."""
    del tokens
    rows = hidden.reshape(-1, hidden.shape[-1])
    return [
      head.finish(rows).reshape(hidden.shape)
      for head in self.merge(params).heads
    ]

  def _logits(self, params, tokens, state):
    """Returns the logits of all heads, [B, K, V']."""
    vectors = self.vectors(params, tokens, state.hidden[:, None])
    if not self.own_unembedding:
      return self.logits(params, jnp.concatenate(vectors, axis=1))
    of_heads = [self.head_logits(params, i, x) for i, x in enumerate(vectors)]
    return jnp.concatenate(of_heads, axis=1)

  def first(self, params, tokens, length, state):
    """See `steps.Steps`: all heads at once."""
    del length
    return self._of_head(self._logits(params, tokens, state), tokens[:, :1], 0)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: a head has seen none of the drafts."""
    del params, parents
    logits, i = carry
    return self._of_head(logits, tokens, i + 1)

  def _of_head(self, logits, tokens, i):
    """Returns head i's logits, the same [B, n, V'] after tokens [B, n]."""
    return steps.of_step(logits, i, tokens), (logits, i)
