"""A drafter of layers that attend to the target's own keys and values.

Gemma 4 is published with one, called its assistant.
"""

import dataclasses
from typing import Annotated, Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import fields
from specsample.drafters import heads
from specsample.drafters import parts
from specsample.drafters import steps
from specsample.drafters import trainable
from specsample.drafters import vocabulary
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.models import network
from specsample.models import transformer


class _Ordered(nnx.Module):
  """Clusters of tokens; drafts come only from the best ones."""

  def __init__(self, config, keys):
    dim, size = config.layer_config.dim, config.num_clusters
    self.clusters = parts.linear(dim, size, keys)
    ids = jnp.arange(config.vocab_size)
    self.ids = network.Buffer(ids, axes=(None,))
    self.num_best = config.num_best_clusters

  def __call__(self, rows):
    """Returns the ids [n, m] of the tokens to draft from, given rows [n, d]."""
    _, best = jax.lax.top_k(self.clusters(rows), self.num_best)
    by_cluster = self.ids[...].reshape(self.clusters.kernel.shape[1], -1)
    found = sharding.map_parts(
      lambda ids, best: jnp.take(ids, best, axis=0),
      (by_cluster, best),
      ((None, None), ('batch', None)),
      result=('batch', None, None),
    )
    return found.reshape(len(best), -1)


class _Network(nnx.Module):
  def __init__(self, config, keys):
    shape = dataclasses.replace(config.layer_config, dtype='float32')
    dim = config.model.dim
    self.joined_axis = sharding.Axis('mlp', 2 * dim)
    axes = (self.joined_axis, None)
    self.project = parts.linear(2 * dim, shape.dim, keys, axes)
    self.first = len(config.kv_layers)
    self.layers = nnx.List(
      [
        decoder_layer.DecoderLayer(shape, keys, i)
        for i in range(self.first, shape.num_layers)
      ]
    )
    self.norm = layers.norm_of(shape, shape.dim)
    self.back = parts.linear(shape.dim, dim, keys)
    self.vocabulary = vocabulary.DraftVocabulary(
      shape.dim, config.vocab_size, has_ids=False, softcap=shape.logit_softcap
    )
    self.ordered = _Ordered(config, keys) if config.num_clusters else None
    self.config = shape

  def __call__(self, embedded, hidden, positions, cache):
    """Returns what is unembedded, [B, n, d], and the next vectors [B, n, D].

    Args:
      embedded: [B, n, D], embeddings of the latest tokens.
      hidden: [B, n, D], vectors of the tokens before them.
      positions: [B] int32, the position of all queries of a row.
      cache: the target's keys and values.
    """
    batch, num_new, _ = embedded.shape
    rows = jnp.concatenate([embedded, hidden], axis=-1)
    rows = rows.reshape(batch * num_new, -1)
    x = self.project(sharding.constrain(rows, 'batch', self.joined_axis))
    repeated = jnp.repeat(positions[:, None], num_new, axis=1)
    size = cache_lib.size(cache.keys[0])
    for number, layer in enumerate(self.layers, self.first):
      source = self.config.kv_source(number)
      window = self.config.window(number)
      keys, values = cache.keys[source], cache.values[source]
      x, _, _ = layer(
        x,
        self.config.rope(repeated, window),
        _mask(cache.length, size, num_new, window),
        *((part, part[:, :, :0]) for part in (keys, values)),
      )
    y = self.norm(x)
    of_nodes = lambda rows: rows.reshape(batch, num_new, -1)
    return of_nodes(y), of_nodes(self.back(y))


def _mask(length, size, num_new, window):
  """Returns a mask [B, n, S] of the last `window` of length [B] tokens."""
  entries = jnp.broadcast_to(jnp.arange(size), (length.size, size))
  entries = sharding.constrain(entries, 'batch', None)
  seen = entries < length[:, None]
  if window is not None:
    seen &= entries >= length[:, None] - window
  seen = jnp.broadcast_to(seen[:, None], (length.size, num_new, size))
  return sharding.constrain(seen, 'batch', None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assistant(trainable.Trainable):
  """A drafter whose layers read the keys and values of some of the target's.

  Each draft token is made of the embedding of the token before it and of a
  vector: first the target's hidden vector, then the drafter's own output. All
  queries of a round have the same position and see the same entries, those of
  tokens that the target has read. The drafter is published with the weights of
  its target and is not trained here.

  Attributes:
    kv_layers: layers of the target that have keys and values of their own.
    layer_config: a `models.transformer.Transformer` whose first layers stand
      for these; the others are the drafter's, and share their keys and values.
    num_clusters: the number of clusters of tokens, of equal size; 0 if all
      tokens are drafted from.
    num_best_clusters: how many clusters a token is drafted from, if there are
      any.
    query_offset: the position of the queries minus that of the pending token: 0
      as in transformers, or -1 as in vLLM.
  """

  kv_layers: tuple[int, ...]
  layer_config: Any
  num_clusters: Annotated[int, settings.at_least(0)] = 0
  num_best_clusters: Annotated[int, settings.at_least(0)] = 0
  query_offset: int = 0
  draft_vocab_size: Annotated[
    None,
    settings.rule(
      lambda x: x is None,
      'None, because an assistant drafts from the whole vocabulary',
    ),
  ] = None
  own_unembedding: Annotated[
    bool,
    settings.rule(bool, 'True, because the unembedding is its own'),
  ] = True
  _network = _Network

  def _check(self):
    super()._check()
    shape = self.layer_config
    for name, value in (('model', self.model), ('layer_config', shape)):
      checks.instance(
        name,
        value,
        transformer.Transformer,
        'give a models.transformer.Transformer',
      )
    of_target = self.model.own_kv_layers
    if not set(self.kv_layers).issubset(of_target):
      raise ValueError(
        f'kv_layers are {self.kv_layers}, but the layers of the target with '
        f'keys and values of their own are {of_target}: name some of those'
      )
    if shape.own_kv_layers != tuple(range(len(self.kv_layers))):
      raise ValueError(
        f'layers {shape.own_kv_layers} of layer_config have keys and values of '
        f'their own, but those must be the first {len(self.kv_layers)}, one '
        'for each of kv_layers: give the drafter that was made for this target'
      )
    for own, layer in enumerate(self.kv_layers):
      found, wanted = (
        (like.num_kv_heads, like.head_dim)
        for like in (self.model.of_layer(layer), shape.of_layer(own))
      )
      if found != wanted:
        raise ValueError(
          f'layer_config has {wanted[0]} key-value heads of {wanted[1]} '
          f'numbers, but layer {layer} of the target has {found[0]} of '
          f'{found[1]}: give the drafter that was made for this target'
        )
    if not self.num_clusters:
      return
    if self.vocab_size % self.num_clusters:
      raise ValueError(
        f'num_clusters is {self.num_clusters}, which does not divide the '
        f'{self.vocab_size} tokens evenly: give the number that the drafter '
        'was trained with'
      )
    if not 1 <= self.num_best_clusters <= self.num_clusters:
      raise ValueError(
        f'num_best_clusters is {self.num_best_clusters}: give an integer from '
        f'1 to {self.num_clusters}'
      )

  @property
  def feature_layers(self) -> tuple[types.KeysAndValues, ...]:
    return tuple(map(types.KeysAndValues, self.kv_layers))

  def init_params(self, key, target_params=None, d2t=None):
    """Returns random parameters, whose unembedding is zero."""
    del target_params
    self._check_number(d2t)
    return sharding.place(self._begin(key, None), self.param_axes())

  def init(self, params, batch_size, max_length):
    dtype = self.own(params)['norm']['scale'].dtype
    shape = dataclasses.replace(
      self.layer_config, has_int8_cache=False, dtype=dtype.name
    )
    cache = shape.init_cache(batch_size, max_length)
    zeros = sharding.zeros((batch_size, self.model.dim), dtype, 'batch', None)
    return heads.HeadsState(
      hidden=zeros,
      length=cache.length,
      cache=dataclasses.replace(
        cache,
        keys=cache.keys[: len(self.kv_layers)],
        values=cache.values[: len(self.kv_layers)],
      ),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    del params, tokens, verdict
    fields.check_dtype(output.hidden.dtype, state.hidden.dtype)
    length = state.length + count
    # [B, T, 2, H, head_dim] to keys and values of [B, H, T, head_dim].
    moved = [jnp.moveaxis(x, (2, 3), (0, 2)) for x in output.features]
    keys, values = zip(*moved, strict=True)
    after = output.hidden[:, 0]
    cache = cache_lib.append(state.cache, keys, values, after=after)
    state = heads.take_in(state, output.hidden, length)
    return dataclasses.replace(state, cache=cache_lib.commit(cache, length))

  def first(self, params, tokens, length, state):
    carry = state.hidden[:, None], state
    return self.next(params, steps.pending(tokens, length), None, carry)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: the carry is vectors [B, n, D], and the state."""
    hidden, state = carry
    vectors, hidden = self.merge(params)(
      self.model.embed(params['target'], tokens),
      steps.of_parents(hidden, tokens, parents),
      state.length + self.query_offset,
      state.cache,
    )
    return self.logits(params, vectors), (hidden, state)

  def logits(self, params, vectors):
    """Returns logits [..., V] of [..., d]: -inf outside the best clusters."""
    own = self.merge(params)
    if own.ordered is None:
      return super().logits(params, vectors)
    rows = vectors.reshape(-1, vectors.shape[-1])
    ids = own.ordered(rows)
    logits = own.vocabulary.at(rows, ids)
    found = indexing.put(logits, ids, self.vocab_size)
    return found.reshape(*vectors.shape[:-1], -1)
