"""Drafts token by token with a second, cheaper model.

Leviathan et al., 2211.17192; Chen et al., 2302.01318.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.drafters import settings
from specsample.types import Array, Draft, DraftLaw, Model


@types.pytree
class ChainState:
  """The draft model's cache and how much of it is known to be right."""

  cache: types.Cache
  length: Array  # [B] int32, tokens in the cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
  """Samples K tokens from `model`, whose parameters are params['drafter']."""

  model: Model
  num_draft_tokens: int
  feature_layers = ()

  def __post_init__(self):
    """Refuses an empty draft."""
    settings.check_num_draft_tokens(self.num_draft_tokens)

  @property
  def vocab_size(self) -> int:
    """The draft model's vocabulary, which has to be the target's."""
    return self.model.vocab_size

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    del params
    return ChainState(
      cache=self.model.init_cache(batch_size, max_length),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`: the chunk goes into the draft model's cache."""
    del output
    _, cache = self.model.apply(_own(params), tokens, state.cache)
    length = state.length + count
    return ChainState(cache=self.model.commit(cache, length), length=length)

  def begin(self, params, tokens, length, state):
    """See `branching.Branching`: a pass over two tokens.

    After a round that kept all K drafts the last of them was never fed to the
    draft model, so the first pass always feeds the last two tokens; for the
    other rows it rewrites an entry with the same values.
    """
    params = _own(params)
    start = jnp.maximum(length - 2, 0)
    last_two = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (2,)))(
      tokens, start
    )
    cache = self.model.commit(state.cache, start)
    output, cache = self.model.apply(params, last_two, cache)
    # Of a sequence of one token, the second of the two is not there yet.
    logits = jnp.take_along_axis(
      output.logits, (length - 1 - start)[:, None, None], axis=1
    )
    cache = self.model.commit(cache, length)
    return logits, ChainState(cache=cache, length=length)

  def grow(self, params, tokens, parents, carry):
    """See `branching.Branching`: a pass over the new nodes."""
    output, cache = self.model.apply(
      _own(params), tokens, carry.cache, parents=parents
    )
    return output.logits, dataclasses.replace(carry, cache=cache)

  def end(self, carry, state):
    """See `branching.Branching`."""
    del state
    cache = self.model.commit(carry.cache, carry.length)
    return dataclasses.replace(carry, cache=cache)

  def target_ids(self, params, ids):
    """See `branching.Branching`."""
    del params
    return ids

  def widen(self, params, logits):
    """See `branching.Branching`."""
    del params
    return logits

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`: one pass a token."""
    logits, begun = self.begin(params, tokens, length, state)
    logits, cache, params = logits[:, 0], begun.cache, _own(params)

    nothing = jnp.full((tokens.shape[0], self.num_draft_tokens), -1, jnp.int32)
    nothing = sharding.constrain(nothing, 'batch', None)

    def draft_one(logits, drafted, i):
      probs = warp(logits, drafted)
      token = draw(probs, length + i)
      return drafted.at[:, i].set(token), probs

    def body(carry, i):
      logits, drafted, cache = carry
      drafted, probs = draft_one(logits, drafted, i)
      output, cache = self.model.apply(params, drafted[:, i, None], cache)
      return (output.logits[:, 0], drafted, cache), probs

    last = self.num_draft_tokens - 1
    (logits, drafted, cache), probs = jax.lax.scan(
      body, (logits, nothing, cache), jnp.arange(last)
    )
    drafted, last_probs = draft_one(logits, drafted, last)
    probs = jnp.concatenate([probs, last_probs[None]])
    draft = Draft(
      tokens=drafted, probs=jnp.swapaxes(probs, 0, 1), law=DraftLaw.SAMPLED
    )
    return draft, ChainState(cache=cache, length=length)

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`: `propose` starts from the committed tokens."""
    del params, tokens, length, output, verdict
    return state


def _own(params):
  if 'drafter' not in params:
    raise ValueError(
      f"params holds {sorted(params)}, and Chain reads params['drafter']: put "
      "the draft model's parameters there"
    )
  return params['drafter']
