"""Drafts with a head for each of the next tokens, all at once.

Cai et al., 2401.10774 (Medusa), as a chain.
"""

import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import heads
from specsample.drafters import vocabulary
from specsample.types import Array, Draft, DraftLaw, Params


class _Head(nnx.Module):
  def __init__(self, config):
    dim = config.model.dim
    self.blocks = nnx.List(
      [heads.ResidualBlock(dim) for _ in range(config.num_layers)]
    )
    self.project = heads.Projection(dim)

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return self.project(x)


class _Network(nnx.Module):
  def __init__(self, config, keys):
    del keys  # every head begins as the identity
    self.heads = nnx.List(
      [_Head(config) for _ in range(config.num_draft_tokens)]
    )
    self.vocabulary = vocabulary.make(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa(heads.Heads):
  """Draws token i from head i, which has seen none of the tokens drafted.

  All K unembeddings are one product.
  """

  _network = _Network

  def vectors(
    self, params: Params, tokens: Array, hidden: Array
  ) -> list[Array]:
    """See `heads.Heads`; the tokens are not read."""
    del tokens
    rows = hidden.reshape(-1, hidden.shape[-1])
    return [
      head(rows).reshape(hidden.shape) for head in self.merge(params).heads
    ]

  def begin(self, params, tokens, length, state):
    """See `branching.Branching`: all heads at once."""
    del length
    vectors = self.vectors(params, tokens, state.hidden[:, None])
    logits = self.logits(params, jnp.concatenate(vectors, axis=1))
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
    vectors = self.vectors(params, tokens, state.hidden[:, None])
    logits = self.target_logits(params, jnp.concatenate(vectors, axis=1))

    def draw_one(drafted, head):
      i, logits = head
      probs = warp(logits, drafted)
      return drafted.at[:, i].set(draw(probs, length + i)), probs

    nothing = jnp.full((tokens.shape[0], self.num_draft_tokens), -1, jnp.int32)
    drafted, probs = jax.lax.scan(
      draw_one,
      sharding.constrain(nothing, 'batch', None),
      (jnp.arange(self.num_draft_tokens), jnp.swapaxes(logits, 0, 1)),
    )
    draft = Draft(
      tokens=drafted, probs=jnp.swapaxes(probs, 0, 1), law=DraftLaw.SAMPLED
    )
    return draft, state
