"""A drafter with a model of another vocabulary, limited to shared tokens.

Token-level intersection: Timor et al., 2502.05202, Algorithm 4.
"""

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.types import Array, Model

# The most pieces that a pass takes in.
_CHUNK = 64
# The same when catching up on rounds without drafts.
_CATCH_UP = 16


@types.pytree
class _Pieces:
  """The pieces of each row, and a cache that holds some of them."""

  cache: types.Cache
  ids: Array  # [B, C + slack] int32, including pieces fed as drafts
  # [B] int32, pieces of the text so far; C + 1 if there are more than C.
  count: Array
  num_known: Array  # [B] int32, leading cache entries that match `ids`
  length: Array  # [B] int32, tokens whose pieces are in `ids`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TLI(steps.Steps):
  """A drafter like `Chain`, limited to tokens that `model` and target share.

  The draft model's distribution is restricted to the shared tokens and
  renormalised. From there on it is over the target's ids, to which sampling
  settings and penalties apply. Tokens that the target emits are fed back to the
  draft model as pieces, by a table that ignores the text around a token.

  params['drafter'] is the result of `VocabMap.params`.

  Attributes:
    model: the draft model.
    vocab_size: V of the target.
    num_draft_tokens: K.
    room, spare: nothing is drafted after a text of t tokens if it has more than
      room * t + spare pieces, or more than fit in the draft model; the buffer
      holds no more. This depends on the row alone, not on its padding.
    most_kept: the most drafts that a round may keep if another drafter's are
      verified too (`drafters.Either`); None means K.
  """

  model: Model
  vocab_size: int
  num_draft_tokens: fields.DraftLength
  room: settings.Positive = 1.5
  spare: Annotated[int, settings.at_least(0)] = 32
  most_kept: settings.Count | None = None

  def _check(self):
    checks.draft_model(self.model)

  def init(self, params, batch_size, max_length):
    prefix = self._own(params)['prefix']
    room = min(
      math.ceil(self.room * max_length) + self.spare + prefix.size,
      self.model.max_length - self.num_draft_tokens,
    )
    if room <= prefix.size:
      raise ValueError(
        f'the draft model takes {self.model.max_length} tokens, too few for '
        f'{self.num_draft_tokens} draft tokens after a text: draft fewer tokens'
      )
    ids = jnp.zeros((batch_size, room + self._slack), jnp.int32)
    ids = ids.at[:, : prefix.size].set(prefix)
    count = lambda: sharding.zeros((batch_size,), jnp.int32, 'batch')
    return _Pieces(
      cache=self.model.init_cache(batch_size, ids.shape[1]),
      ids=sharding.constrain(ids, 'batch', None),
      count=count() + prefix.size,
      num_known=count(),
      length=count(),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `Drafter`: feeds a prompt's pieces to the draft model.

    What a round emitted is read from the text of the next one.
    """
    del output
    if verdict is not None:
      return state
    state = self._append(params, tokens, count, state)
    return self._feed(params, state, min(tokens.shape[1], _CHUNK), leave=0)

  def first(self, params, tokens, length, state):
    """See `steps.Steps`: a pass over the last two pieces, as in Chain.

    Earlier pieces that are still missing go first, two per pass.
    """
    state = self.pause(params, tokens, length, state)
    state = self._feed(params, state, 2, leave=2)
    known = self._num_fed(state)
    start = jnp.maximum(known - 2, 0)
    output, cache = self.model.apply(
      self._own(params)['model'],
      _take(state.ids, start, 2),
      self.model.commit(state.cache, start),
    )
    last = jnp.maximum(known - 1 - start, 0)[:, None]
    logits = indexing.at(output.logits, last)
    cache = self.model.commit(cache, known)
    state = dataclasses.replace(state, cache=cache, num_known=known)
    is_there = self._has_room(params, state)[:, None, None]
    return jnp.where(is_there, self._to_target(params, logits), -jnp.inf), state

  def pause(self, params, tokens, length, state):
    """See `Drafter`: stores new tokens' pieces, to be fed later."""
    # At most the kept drafts and one more token are new.
    index = state.length[:, None] + jnp.arange(self._most_new)
    new = jnp.take_along_axis(tokens, index, axis=1, mode='clip')
    return self._append(params, new, length - state.length, state)

  def resume(self, params, tokens, length, state):
    """See `Drafter`: `first` would feed only two pieces per pass."""
    state = self.pause(params, tokens, length, state)
    return self._feed(params, state, _CATCH_UP, leave=2)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: a pass over the new tokens, one piece each."""
    own = self._own(params)
    places = sharding.of_new('batch', None)
    fed = own['draft_ids'].at[jnp.maximum(tokens, 0)].get(out_sharding=places)
    fed = jnp.maximum(fed, 0)  # an arbitrary piece for -1
    # A model for chains alone need not take parents.
    trees = {} if parents is None else {'parents': parents}
    output, cache = self.model.apply(own['model'], fed, carry.cache, **trees)
    carry = dataclasses.replace(carry, cache=cache)
    if parents is None:
      # The piece counts as known until the text turns out differently.
      known = carry.num_known
      carry = dataclasses.replace(
        carry,
        ids=_write(carry.ids, fed, known[:, None]),
        num_known=known + 1,
      )
    return self._to_target(params, output.logits), carry

  def end(self, carry, state):
    del state
    cache = self.model.commit(carry.cache, carry.num_known)
    return dataclasses.replace(carry, cache=cache)

  def with_most_kept(self, most_kept):
    return dataclasses.replace(self, most_kept=most_kept)

  @property
  def _slack(self):
    """Spare entries after the last kept piece, to hold what one pass feeds."""
    return max(_CHUNK, self._most_new)

  @property
  def _most_new(self):
    """The most tokens that a round may emit."""
    return 1 + (self.most_kept or self.num_draft_tokens)

  def _room(self, state):
    """Returns C, the most pieces that a text may have."""
    return state.ids.shape[1] - self._slack

  def _has_room(self, params, state):
    """Returns which rows draft, [B] bool."""
    own = self.room * state.length + self.spare
    own = own + self._own(params)['prefix'].size
    count = state.count
    return (count > 0) & (count <= own) & (count <= self._room(state))

  def _num_fed(self, state):
    """Returns how many pieces [B] of the text belong in the cache."""
    return jnp.minimum(state.count, self._room(state))

  def _append(self, params, tokens, count, state):
    """Appends the pieces of tokens [B, T], of which count [B] are new.

    Pieces fed as drafts stay known as long as the text agrees with them.
    """
    room, size = self._room(state), state.ids.shape[1]
    places = sharding.of_new('batch', None, None)
    table = self._own(params)['pieces']
    new = table.at[tokens].get(out_sharding=places)  # [B, T, P]
    is_new = jnp.arange(tokens.shape[1]) < count[:, None]
    is_piece = ((new >= 0) & is_new[..., None]).reshape(len(tokens), -1)
    index = state.count[:, None] + jnp.cumsum(is_piece, axis=1) - 1
    index = jnp.where(is_piece & (index < room), index, size)
    ids = _write(state.ids, new.reshape(len(tokens), -1), index)
    total = state.count + jnp.sum(is_piece, axis=1)
    total = jnp.minimum(total, room + 1).astype(jnp.int32)
    differs = jnp.where(ids != state.ids, jnp.arange(size), size)
    num_known = jnp.minimum(state.num_known, jnp.min(differs, axis=1))
    return dataclasses.replace(
      state,
      ids=ids,
      count=total,
      num_known=jnp.minimum(num_known, total),
      length=state.length + count,
    )

  def _feed(self, params, state, width, leave):
    """Feeds all pieces but the last `leave`, at most `width` per pass."""
    end = self._num_fed(state) - leave

    def cond(carry):
      known, _ = carry
      return jnp.any(known < end)

    def body(carry):
      known, cache = carry
      _, cache = self.model.apply(
        self._own(params)['model'],
        _take(state.ids, known, width),
        self.model.commit(cache, known),
      )
      known = jnp.maximum(known, jnp.minimum(known + width, end))
      return known, self.model.commit(cache, known)

    known, cache = jax.lax.while_loop(
      cond,
      body,
      (state.num_known, self.model.commit(state.cache, state.num_known)),
    )
    return dataclasses.replace(state, num_known=known, cache=cache)

  def _to_target(self, params, logits):
    """Maps the draft model's logits to [B, n, V], -inf for what it lacks."""
    ids = self._own(params)['draft_ids']
    logits = sharding.constrain(logits, 'batch', None, None)
    take = jax.vmap(jax.vmap(lambda row: row.at[jnp.maximum(ids, 0)].get()))
    wide = jnp.where(ids >= 0, take(logits), -jnp.inf)
    vocab = sharding.Axis('vocab', self.vocab_size)
    return sharding.constrain(wide, 'batch', None, vocab)

  def _own(self, params) -> Any:
    own = params.get('drafter', {})
    names = {'model', 'draft_ids', 'pieces', 'prefix'}
    if not names <= set(own):
      raise ValueError(
        f"params['drafter'] has the keys {sorted(own)}, but TLI reads "
        f'{sorted(names)}: put what params() of the VocabMap returns there'
      )
    if own['draft_ids'].shape != (self.vocab_size,):
      raise ValueError(
        f'vocab_size is {self.vocab_size}, but the map was made for a target '
        f'with {own["draft_ids"].size} tokens: give the vocabulary size of '
        'that target'
      )
    return own


def _take(rows: Array, start: Array, width: int) -> Array:
  """Returns `width` entries of rows [B, S] from start [B] on."""
  of_row = lambda row, i: jax.lax.dynamic_slice(row, (i,), (width,))
  return jax.vmap(of_row)(rows, start)


def _write(rows: Array, values: Array, index: Array) -> Array:
  """Writes values [B, n] into rows [B, S] at index [B, n]; S is dropped."""
  of_row = lambda row, values, index: row.at[index].set(values, mode='drop')
  return jax.vmap(of_row)(rows, values, index)
