"""Common parts of drafters that continue from the target's features.

They draft token by token. Entry t is made of the target's feature at token t
and of token t + 1, and its output is read for token t + 2. So there are as many
entries as tokens before the pending one. While a draft is drawn, the output of
the previous entry stands in for a feature that the target has not computed yet
(EAGLE, Li et al., 2401.15077).
"""

import abc
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.models import cache as cache_lib
from specsample.models import int8
from specsample.models import masks
from specsample.types import Array, Params


@types.pytree
class FeatureState:
  """The entries and features of the tokens before the pending one."""

  # One per module, with the entries whose tokens are known.
  caches: tuple[cache_lib.KVCache, ...]
  # The inputs of each module's next entries, starting with the first that isn't
  # in its cache: [B, n, D] from the target, [B, 1, D] from the previous module.
  features: tuple[Array, ...]
  length: Array  # [B] int32, tokens whose features are known


@types.pytree
class _Beginning:
  """A round in which not all modules have made their entries yet."""

  state: FeatureState
  before: Array  # [B, n, D], what the latest module put out, or its features
  known: Array  # [B] int32, how many entries it had before the round
  caches: tuple[cache_lib.KVCache, ...]  # of the modules so far
  kept: tuple[Array, ...]  # [B, 1, D], what modules after the first keep
  tokens: Array  # [B, S] int32
  length: Array  # [B] int32
  drafted: Array  # [B, i] int32, the drafts so far


@types.pytree
class _Drafting:
  """A round in which the last module continues from its own outputs."""

  outputs: Array  # [B, n, D], of the latest entries
  cache: cache_lib.KVCache  # of the last module
  length: Array  # [B] int32, its entries that are not guesses
  caches: tuple[cache_lib.KVCache, ...]  # of the other modules
  kept: tuple[Array, ...]  # [B, 1, D], what modules after the first keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureChain(trainable.Trainable, abc.ABC):
  """The parts of `Drafter` that are the same for all networks.

  A module of a network is called with rows of embeddings and features
  [B * T, D], followed by the other arguments of `decoder_layer.DecoderLayer`,
  and returns what that returns. Its `read` turns outputs [B * T, D] into what
  the unembedding reads.

  Most networks have one module. If there are more, each continues from the
  outputs of the previous one, one token further: entry t of module i is made of
  token t + i + 1, and its output is read for token t + i + 2. The last module
  makes all remaining drafts.

  The caches hold only entries made of the target's own features and of kept
  tokens. The entries of a round's kept drafts are made in the next round, in
  the passes that begin it.

  Attributes:
    layer_config: a `models.transformer.Transformer` that gives the shape of the
      layers, as a model of such layers alone; None for the target's.
    most_kept: the most drafts that a round may keep if another drafter's drafts
      are verified too (`drafters.Either`); None for num_draft_tokens.
  """

  layer_config: Any = None
  most_kept: settings.Count | None = None

  def _check(self):
    super()._check()
    fields.check_shape(self)
    layers = self.feature_layers
    if layers:
      fields.check_layers('feature_layers', layers, self.model.num_layers, -1)

  @property
  def window(self) -> int | None:
    """How many entries each entry sees; None for all.

    The layer counts as one that follows all layers of `shape`.
    """
    return self.shape.window(self.shape.num_layers)

  @property
  def windows(self) -> tuple[int | None, ...]:
    """The window of each layer of a module."""
    return (self.window,)

  @property
  def num_modules(self) -> int:
    """The number of modules."""
    return 1

  def modules(self, params: Params) -> Sequence[Any]:
    """Returns the modules, of which at most K draft."""
    return [self.merge(params)]

  @abc.abstractmethod
  def features(
    self, params: Params, hidden: Array, of_layers: tuple[Array, ...]
  ) -> Array:
    """Returns what the network reads of the target, [B, T, D].

    Args:
      params: the whole tree of parameters.
      hidden: [B, T, D], the target's hidden vectors.
      of_layers: [B, T, D] each, the outputs of `feature_layers`.
    """

  def vectors(self, params: Params, outputs: Array, number: int) -> Array:
    """Maps outputs [..., D] to the unembedding's input for draft `number`."""
    modules = self.modules(params)
    module = modules[min(number, len(modules) - 1)]
    return module.read(_rows(outputs)).reshape(outputs.shape)

  def init(self, params, batch_size, max_length):
    return self.init_tree(
      params, batch_size, max_length, self.num_draft_tokens - 1
    )

  def init_tree(self, params, batch_size, max_length, num_nodes):
    """See `steps.Steps`: a ring has room for the window and a round."""
    dtype = int8.dtype_of(self.own(params))
    num_used = min(self.num_modules, self.num_draft_tokens)
    # A single module may leave a round's entries for later; see `pause`.
    rounds = 2 if self.num_modules == 1 else 1
    sizes = [rounds * self._most_new] + [1] * (num_used - 1)
    # A module's first pass reads one input more than the previous module's.
    max_new = max(self._most_new + num_used - 1, num_nodes)
    zeros = lambda size: sharding.zeros(
      (batch_size, size, self.model.dim), dtype, 'batch', None, None
    )
    return FeatureState(
      caches=tuple(
        self.empty_cache(batch_size, max_length, dtype, max_new)
        for _ in range(num_used)
      ),
      features=tuple(map(zeros, sizes)),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `Drafter`: features of a round wait for the next one."""
    fields.check_dtype(output.hidden.dtype, state.features[0].dtype)
    features = self.features(params, output.hidden, output.features)
    if verdict is None:
      return self._read(params, tokens, count, features, state)
    held = state.features[0]
    index = jnp.arange(held.shape[1]) - self._num_waiting(state)[:, None]
    new = indexing.at(features, jnp.clip(index, 0, features.shape[1] - 1))
    held = jnp.where(index[..., None] < 0, held, new)
    return dataclasses.replace(
      state,
      features=(held, *state.features[1:]),
      length=state.length + count,
    )

  def _read(self, params, tokens, count, before, state):
    """Makes a prompt's entries; the last one waits for the next token."""
    place = jnp.arange(tokens.shape[1])
    # How many of a module's inputs are known before and after the chunk.
    known, length = state.length, state.length + count
    caches, kept = [], []
    for i, cache in enumerate(state.caches):
      held = state.features[i][:, :1]
      before = jnp.concatenate([held, before], axis=1)
      kept.append(indexing.at(before, (length - known)[:, None]))
      index = cache.length[:, None] + 1 + i + place - state.length[:, None]
      num_before, num_after = (jnp.maximum(x - 1, 0) for x in (known, length))
      before, cache = self._run(
        params,
        i,
        indexing.at(tokens, jnp.minimum(index, place[-1])),
        indexing.at(before, (known == 0)[:, None] + place),
        cache,
        count=num_after - num_before,
      )
      known, length = num_before, num_after
      caches.append(cache_lib.commit(cache, length))
    of_target = jnp.concatenate([kept[0], state.features[0][:, 1:]], axis=1)
    return FeatureState(
      caches=tuple(caches),
      features=(of_target, *kept[1:]),
      length=state.length + count,
    )

  @property
  def num_unrolled(self) -> int:
    """See `steps.Steps`: each module but the last makes one draft."""
    return min(self.num_modules, self.num_draft_tokens) - 1

  def first(self, params, tokens, length, state):
    """See `steps.Steps`: a pass of the first module over up to K + 1 entries.

    After a prompt of one token there is no feature yet, and zeros stand in for
    it.
    """
    beginning = _Beginning(
      state=state,
      before=state.features[0][:, : self._most_new],
      # Inputs are numbered from `known` - 1 on; the first is void if it is 0.
      known=state.caches[0].length + 1,
      caches=(),
      kept=(),
      tokens=tokens,
      length=length,
      drafted=tokens[:, :0],
    )
    return self._begin_module(params, beginning)

  def root(self, params, tokens, length, state):
    if self.num_unrolled:
      raise ValueError(
        f'num_modules is {self.num_modules}, but a tree needs a single module, '
        'which continues from its own outputs: give num_modules = 1'
      )
    return self.first(params, tokens, length, state)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: new entries read their parents' outputs."""
    if isinstance(carry, _Beginning):
      drafted = jnp.concatenate([carry.drafted, tokens], axis=1)
      carry = dataclasses.replace(carry, drafted=drafted)
      return self._begin_module(params, carry)
    number = len(carry.caches)
    before = steps.of_parents(carry.outputs, tokens, parents)
    outputs, cache = self._run(
      params, number, tokens, before, carry.cache, parents
    )
    carry = dataclasses.replace(carry, outputs=outputs, cache=cache)
    return self._logits(params, outputs, number), carry

  def _begin_module(self, params, carry):
    """Makes the entries of the next module; returns its logits and a carry."""
    state, length = carry.state, carry.length
    number = carry.drafted.shape[1]
    before, kept, cache = carry.before, carry.kept, state.caches[number]
    if number:
      before = jnp.concatenate([state.features[number], before], axis=1)
      first = carry.caches[-1].length - carry.known
      kept = (*kept, indexing.at(before, first[:, None]))
    place, start = jnp.arange(before.shape[1]), cache.length
    index = jnp.minimum((carry.known == 0)[:, None] + place, place[-1])
    before = indexing.at(before, index)
    index = start[:, None] + 1 + number + place
    new = _behind_drafts(carry.tokens, length, carry.drafted, index)
    outputs, cache = self._run(params, number, new, before, cache)
    last = indexing.at(outputs, jnp.maximum(length - 2 - start, 0)[:, None])
    logits = self._logits(params, last, number)
    true_length = jnp.maximum(length - 1 - number, 0)
    if number < self.num_unrolled:
      return logits, dataclasses.replace(
        carry,
        before=outputs,
        known=start,
        caches=(*carry.caches, cache_lib.commit(cache, true_length)),
        kept=kept,
      )
    return logits, _Drafting(
      outputs=last,
      cache=cache_lib.commit(cache, length - 1),
      length=true_length,
      caches=carry.caches,
      kept=kept,
    )

  def end(self, carry, state):
    """See `steps.Steps`: entries made of outputs are dropped."""
    cache = cache_lib.commit(carry.cache, carry.length)
    return dataclasses.replace(
      state,
      caches=(*carry.caches, cache),
      features=(state.features[0], *carry.kept),
    )

  def pause(self, params, tokens, length, state):
    """See `Drafter`: entries wait while there is room for more.

    A pass over the entries of several rounds costs as much as a pass over the
    entries of one.
    """
    if self.num_modules > 1:
      _, carry = self.first(params, tokens, length, state)
      nothing = jnp.zeros_like(tokens[:, :1])
      for _ in range(self.num_unrolled):
        _, carry = self.next(params, nothing, None, carry)
      return self.end(carry, state)
    most_new = self._most_new

    def make_entries(state):
      (cache,), (features,) = state.caches, state.features
      start = cache.length
      # The last entry waits: drafting continues from its output.
      count = jnp.clip(self._num_waiting(state) - 1, 0, most_new)
      index = start[:, None] + 1 + jnp.arange(most_new)
      new = _behind_drafts(tokens, length, tokens[:, :0], index)
      _, cache = self._run(params, 0, new, features[:, :most_new], cache)
      place = count[:, None] + jnp.arange(features.shape[1])
      left = indexing.at(features, jnp.minimum(place, features.shape[1] - 1))
      cache = cache_lib.commit(cache, start + count)
      return dataclasses.replace(state, caches=(cache,), features=(left,))

    is_full = jnp.any(self._num_waiting(state) > most_new)
    return jax.lax.cond(is_full, make_entries, lambda state: state, state)

  def resume(self, params, tokens, length, state):
    """See `Drafter`: leaves no more than `first` takes in."""
    if self.num_modules > 1:
      return state
    return self.pause(params, tokens, length, state)

  def with_most_kept(self, most_kept):
    return dataclasses.replace(self, most_kept=most_kept)

  @property
  def _most_new(self):
    """The most tokens that a round may emit."""
    return 1 + (self.most_kept or self.num_draft_tokens)

  def _num_waiting(self, state):
    """Counts entries that can be made but are not in the first cache, [B]."""
    return state.length - state.caches[0].length

  def _logits(self, params, outputs, number):
    return self.logits(params, self.vectors(params, outputs, number))

  def _run(
    self,
    params,
    number,
    tokens,
    features,
    cache,
    parents=None,
    *,
    count=None,
    num_kept=None,
  ):
    """Returns a module's outputs [B, T, D] after its cache, and the new cache.

    Entries are made of tokens [B, T] and of the features before them. With
    parents, as in `types.Model.apply`, they are nodes of a tree. The count is
    that of `cache.append`; the first `num_kept` entries are written, by default
    all.
    """
    num_new = tokens.shape[1]
    contexts = []
    for window, keys, values in zip(
      self.windows, cache.keys, cache.values, strict=True
    ):
      sizes = (cache.length, num_new, cache_lib.size(keys))
      if parents is None:
        positions = cache.length[:, None] + jnp.arange(num_new)
        mask = masks.causal(*sizes, window)
      else:
        mask, positions = masks.of_tree(*sizes, parents, window)
      rope = self.shape.rope(positions, window)
      contexts.append((rope, mask, keys, values))
    rows, *new = self._apply(
      self.modules(params)[number],
      _rows(self._embed(params, tokens)),
      _rows(features),
      contexts,
    )
    outputs = rows.reshape(features.shape)
    keys, values = jax.tree.map(lambda x: x[:, :, :num_kept], new)
    return outputs, cache_lib.append(
      cache, keys, values, after=outputs[:, 0], count=count
    )

  def _embed(self, params, tokens):
    return self.model.embed(params['target'], tokens)

  def _apply(self, module, embedded, features, contexts):
    """Applies a module; returns rows, and new keys and values of each layer.

    `contexts` has what each layer reads besides rows, in its order.
    """
    rows, keys, values = module(embedded, features, *contexts[0])
    return rows, [keys], [values]

  def empty_cache(
    self,
    batch_size: int,
    max_length: int,
    dtype: jnp.dtype,
    max_new: int | None = None,
  ) -> cache_lib.KVCache:
    """Returns a module's cache without entries.

    Layers with a window are rings if `max_new` is given, the most entries that
    follow those of kept tokens; see `models.cache`.
    """
    layers = dataclasses.replace(
      self.shape,
      num_layers=len(self.windows),
      sliding_layers=tuple(
        i for i, window in enumerate(self.windows) if window is not None
      ),
      has_int8_cache=False,
      dtype=jnp.dtype(dtype).name,
    )
    return layers.init_cache(batch_size, max_length, max_new)


def _behind_drafts(tokens, length, drafted, index):
  """Returns tokens [B, T] at index [B, T]: drafts [B, n] from length [B] on."""
  found = indexing.at(tokens, jnp.minimum(index, length[:, None] - 1))
  num_drafts = drafted.shape[1]
  if not num_drafts:
    return found
  ahead = index - length[:, None]
  drafts = indexing.at(drafted, jnp.clip(ahead, 0, num_drafts - 1))
  return jnp.where(ahead < 0, found, drafts)


def _rows(x):
  return x.reshape(-1, x.shape[-1])
