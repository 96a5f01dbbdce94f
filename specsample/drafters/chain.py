"""Token-by-token drafting with a second, cheaper model.

Leviathan et al., 2211.17192; Chen et al., 2302.01318.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.drafters import sequential
from specsample.drafters import settings
from specsample.types import Array, Model

# Tokens per pass when a draft model catches up after a pause.
_CATCH_UP = 16


@types.pytree
class ChainState:
  """The draft model's cache and how much of it is known to be right."""

  cache: types.Cache
  length: Array  # [B] int32, tokens whose entries are known to be right
  fed: Array  # [B, K - 1] int32, drafts whose entries follow, -1 after the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
  """A drafter that samples K tokens from `model`, given params['drafter']."""

  model: Model
  num_draft_tokens: int
  feature_layers = ()

  def __post_init__(self):
    """Raises ValueError unless K is an integer of at least 1."""
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
      fed=self._nothing_fed(batch_size),
    )

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`: the chunk goes into the draft model's cache."""
    del output
    _, cache = self.model.apply(_own(params), tokens, state.cache)
    length = state.length + count
    cache = self.model.commit(cache, length)
    return dataclasses.replace(state, cache=cache, length=length)

  def begin(self, params, tokens, length, state):
    """See `branching.Branching`: a pass over what a round of a tree can add."""
    return self._begin(params, tokens, length, state, self.num_draft_tokens + 1)

  def _begin(self, params, tokens, length, state, width):
    """Runs `begin` with a pass over the last `width` tokens.

    If a round keeps all K drafts, the last of them was never fed to the draft
    model, so `width` is at least 2. Entries that are already right are written
    again with the same values.
    """
    width = min(width, tokens.shape[1])
    start = jnp.maximum(length - width, 0)
    output, cache = self._feed(params, tokens, start, width, state.cache)
    # If the sequence is shorter than `width`, the pass runs past its end.
    logits = jnp.take_along_axis(
      output.logits, (length - 1 - start)[:, None, None], axis=1
    )
    return logits, ChainState(
      cache=self.model.commit(cache, length),
      length=length,
      fed=self._nothing_fed(length.shape[0]),
    )

  def _feed(self, params, tokens, start, width, cache):
    """Runs a pass over `width` tokens from index start [B] on."""
    index = start[:, None] + jnp.arange(width)
    inputs = jnp.take_along_axis(
      tokens, jnp.minimum(index, tokens.shape[1] - 1), axis=1
    )
    cache = self.model.commit(cache, start)
    return self.model.apply(_own(params), inputs, cache)

  def resume(self, params, tokens, length, state):
    """See `pausable.Pausable`: feeds the tokens that were left out."""

    def cond(state):
      return jnp.any(state.length < length - 2)

    width = min(_CATCH_UP, tokens.shape[1])

    def feed(state):
      # Nothing can be written past the end of the buffer.
      start = jnp.minimum(state.length, tokens.shape[1] - width)
      _, cache = self._feed(params, tokens, start, width, state.cache)
      known = jnp.minimum(start + width, length - 1)
      known = jnp.maximum(known, state.length)
      cache = self.model.commit(cache, known)
      return dataclasses.replace(state, cache=cache, length=known)

    return jax.lax.while_loop(cond, feed, state)

  def pause(self, params, tokens, length, state):
    """See `pausable.Pausable`: `resume` feeds the tokens later."""
    del params, tokens, length
    return state

  def go_on(self, params, tokens, carry):
    """See `sequential.Sequential`: a pass over one token."""
    output, cache = self.model.apply(
      _own(params), jnp.maximum(tokens, 0)[:, None], carry.cache
    )
    # The first slot that is still free.
    is_next = jnp.cumsum(carry.fed < 0, axis=1) == 1
    fed = jnp.where(is_next, tokens[:, None], carry.fed)
    carry = dataclasses.replace(carry, cache=cache, fed=fed)
    return output.logits[:, 0], carry

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

  def first(self, params, tokens, length, state):
    """See `sequential.Sequential`: a pass over the last two tokens."""
    logits, carry = self._begin(params, tokens, length, state, 2)
    return logits[:, 0], carry

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`: one pass per token."""
    return sequential.propose(
      draw, warp, tokens, length, state, drafter=self, params=params
    )

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`: entries of drafts that were emitted are right.

    The verified draft may be another drafter's, so the tokens are compared.
    """
    del params, output, verdict
    place = state.length[:, None] + jnp.arange(state.fed.shape[1])
    last = tokens.shape[1] - 1
    emitted = jnp.take_along_axis(tokens, jnp.minimum(place, last), axis=1)
    # The last token is pending, so its entry does not count even if it was fed.
    is_right = (emitted == state.fed) & (place < length[:, None] - 1)
    kept = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1)
    return dataclasses.replace(
      state,
      length=state.length + kept,
      fed=self._nothing_fed(length.shape[0]),
    )

  def _nothing_fed(self, batch_size):
    shape = (batch_size, self.num_draft_tokens - 1)
    return sharding.zeros(shape, jnp.int32, 'batch', None) - 1


def _own(params):
  if 'drafter' not in params:
    raise ValueError(
      f'params has the keys {sorted(params)}, but Chain reads '
      "params['drafter']: put the draft model's parameters there"
    )
  return params['drafter']
