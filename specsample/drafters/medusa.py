"""A drafter with a head for each of the next tokens, run all at once.

Cai et al., 2401.10774 (Medusa), as a chain.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import heads
from specsample.drafters import signals as signals_lib
from specsample.types import Array, Draft, DraftKind, Params


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

  def begin(self, params, tokens, length, state):
    """See `branching.Branching`: all heads at once."""
    del length
    logits = self._logits(params, tokens, state)
    return logits[:, :1], (logits, 1)

  def grow(self, params, tokens, parents, carry):
    """See `branching.Branching`: a head has seen none of the drafts."""
    del params, parents
    logits, i = carry
    shape = (*tokens.shape, logits.shape[-1])
    return jnp.broadcast_to(logits[:, i, None], shape), (logits, i + 1)

  def end(self, carry, state):
    """See `branching.Branching`."""
    del carry
    return state

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`."""
    logits = self.widen(params, self._logits(params, tokens, state))

    def draw_one(drafted, head):
      i, logits = head
      probs = warp(logits, drafted)
      token = draw(probs, length + i)
      signals = signals_lib.of_tokens(logits, token)
      return drafted.at[:, i].set(token), (probs, signals)

    nothing = jnp.full((tokens.shape[0], self.num_draft_tokens), -1, jnp.int32)
    drafted, found = jax.lax.scan(
      draw_one,
      sharding.constrain(nothing, 'batch', None),
      (jnp.arange(self.num_draft_tokens), jnp.swapaxes(logits, 0, 1)),
    )
    probs, signals = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    draft = Draft(
      tokens=drafted, probs=probs, kind=DraftKind.SAMPLED, signals=signals
    )
    return draft, state
