"""Token-by-token drafting with a second, cheaper model.

Leviathan et al., 2211.17192; Chen et al., 2302.01318.
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.types import Array, Model, Params

# Tokens per pass when a draft model catches up after a pause.
_CATCH_UP = 16


@types.pytree
class ChainState:
  """The draft model's cache and how much of it is known to be right."""

  cache: types.Cache
  length: Array  # [B] int32, tokens whose entries are known to be right
  fed: Array  # [B, K - 1] int32, drafts whose entries follow, -1 after the last


class OverModel(steps.Steps):
  """A drafter that samples from a `types.Model`, one pass per token."""

  @property
  @abc.abstractmethod
  def draft_model(self) -> Model:
    """The model, whose vocabulary is the target's."""

  @abc.abstractmethod
  def draft_params(self, params: Params) -> Params:
    """Returns the model's parameters, given the whole tree."""

  def vectors(
    self, params: Params, tokens: Array, parents: Array | None = None
  ) -> Array:
    """Returns what the unembedding reads of sequences [B, T]: [B, T, D].

    With parents they are trees, as in `types.Model.apply`.
    """
    empty = self.draft_model.init_cache(tokens.shape[0], 0)
    return self._apply(params, tokens, empty, parents)[0].hidden

  def init(self, params, batch_size, max_length):
    del params
    return ChainState(
      cache=self.draft_model.init_cache(batch_size, max_length),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
      fed=self._nothing_fed(batch_size),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `Drafter`.

    A prompt's tokens go into the draft model's cache. After a round, entries of
    drafts that stayed are right. They may be another drafter's, so the tokens
    are compared.
    """
    del output
    if verdict is None:
      _, cache = self._apply(params, tokens, state.cache)
      length = state.length + count
      cache = self.draft_model.commit(cache, length)
      return dataclasses.replace(state, cache=cache, length=length)
    num_fed = state.fed.shape[1]
    stayed = 1 + jnp.arange(num_fed) < count[:, None]
    is_right = (tokens[:, 1 : 1 + num_fed] == state.fed) & stayed
    kept = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1)
    return dataclasses.replace(
      state,
      length=state.length + kept,
      fed=self._nothing_fed(count.shape[0]),
    )

  @property
  def _num_read(self) -> int:
    """How many tokens `first` reads, the pending one last.

    If a round keeps all K drafts, the last of them was never fed to the draft
    model, so it is at least 2.
    """
    return 2

  def first(self, params, tokens, length, state):
    """See `steps.Steps`: a pass over the last two tokens."""
    return self._start(params, tokens, length, state, self._num_read)

  def root(self, params, tokens, length, state):
    """See `steps.Steps`: a pass over what a round of a tree can add."""
    return self._start(params, tokens, length, state, self.num_draft_tokens + 1)

  def _start(self, params, tokens, length, state, width):
    output, pending, state = self._read(params, tokens, length, state, width)
    return indexing.at(output.logits, pending[:, None]), state

  def _read(self, params, tokens, length, state, width, num_more=0):
    """Runs a pass over the last `width` tokens and `num_more` after them.

    Entries that are already right are written again with the same values, and
    the next pass overwrites those after the pending token.

    Returns the output, the index [B] of the pending token in it, and the state.
    """
    start = jnp.maximum(length - width, 0)
    # If the sequence is shorter than `width`, the pass runs past its end.
    width = min(width + num_more, tokens.shape[1])
    output, cache = self._feed(params, tokens, start, width, state.cache)
    state = ChainState(
      cache=self.draft_model.commit(cache, length),
      length=length,
      fed=self._nothing_fed(length.shape[0]),
    )
    return output, length - 1 - start, state

  def _feed(self, params, tokens, start, width, cache):
    """Runs a pass over `width` tokens from index start [B] on."""
    index = start[:, None] + jnp.arange(width)
    inputs = indexing.at(tokens, jnp.minimum(index, tokens.shape[1] - 1))
    cache = self.draft_model.commit(cache, start)
    return self._apply(params, inputs, cache)

  def _apply(self, params, tokens, cache, parents=None):
    own = self.draft_params(params)
    if parents is None:  # a model for chains alone need not take them
      return self.draft_model.apply(own, tokens, cache)
    return self.draft_model.apply(own, tokens, cache, parents=parents)

  def resume(self, params, tokens, length, state):

    def cond(state):
      return jnp.any(state.length < length - self._num_read)

    width = min(_CATCH_UP, tokens.shape[1])

    def feed(state):
      # Nothing can be written past the end of the buffer.
      start = jnp.minimum(state.length, tokens.shape[1] - width)
      _, cache = self._feed(params, tokens, start, width, state.cache)
      known = jnp.minimum(start + width, length - 1)
      known = jnp.maximum(known, state.length)
      cache = self.draft_model.commit(cache, known)
      return dataclasses.replace(state, cache=cache, length=known)

    return jax.lax.while_loop(cond, feed, state)

  def next(self, params, tokens, parents, carry):
    output, cache = self._apply(params, tokens, carry.cache, parents)
    fed = carry.fed
    if parents is None:
      # The first slot that is still free.
      is_next = jnp.cumsum(fed < 0, axis=1) == 1
      fed = jnp.where(is_next, tokens, fed)
    return output.logits, dataclasses.replace(carry, cache=cache, fed=fed)

  def end(self, carry, state):
    del state
    cache = self.draft_model.commit(carry.cache, carry.length)
    return dataclasses.replace(carry, cache=cache)

  def _nothing_fed(self, batch_size):
    shape = (batch_size, self.num_draft_tokens - 1)
    return sharding.zeros(shape, jnp.int32, 'batch', None) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTwoModels(OverModel):
  """A drafter over a second `model` with the parameters params['drafter'].

  The model's vocabulary has to be the target's.
  """

  model: Any  # a types.Model
  num_draft_tokens: fields.DraftLength

  def _check(self):
    checks.draft_model(self.model)

  @property
  def vocab_size(self) -> int:
    """V of the model, which is the target's."""
    return self.model.vocab_size

  @property
  def draft_model(self) -> Model:
    return self.model

  def draft_params(self, params):
    return fields.own(self, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(OfTwoModels, trainable.Learnable):
  """A drafter that samples K tokens from a second model, one after another."""

  def is_trained(self) -> Params:
    return jax.tree.map(lambda _: True, self.model.abstract_params())

  def logits(self, params, vectors):
    return self.model.unembed(self.draft_params(params), vectors)

  def unembedding(self, params):
    return {'drafter': self.draft_params(params)}
