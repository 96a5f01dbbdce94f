"""EAGLE-3 with K slots, of which one pass makes all drafts.

P-EAGLE, 2602.01469.
"""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample.drafters import eagle
from specsample.drafters import fields
from specsample.drafters import steps
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import matrices


class _PEagle(eagle.Eagle3Network):
  def __init__(self, config, keys):
    super().__init__(config, keys)
    dim, size = config.model.dim, config.model.vocab_size
    shape = dataclasses.replace(config.shape, dtype='float32')
    # The layers after the first one, which is `layer`.
    self.layers = nnx.List(
      [
        decoder_layer.DecoderLayer(shape, keys)
        for _ in range(config.num_layers - 1)
      ]
    )
    num_features = len(config.feature_layers)
    mask = dim**-0.5 * jax.random.normal(next(keys), (num_features * dim,))
    self.mask_hidden = nnx.Param(mask, axes=(None,))
    self.vocab_axis = sharding.Axis('vocab', size)
    self.embedding: Any = (
      nnx.Param(jnp.zeros((dim, size)), axes=(None, self.vocab_axis))
      if config.own_embedding
      else None
    )

  def embed(self, ids):
    dtype = self.norm.scale[...].dtype
    table = self.embedding.get_value()
    return matrices.lookup(table, ids, self.vocab_axis, dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagle(steps.OnePass, eagle.Eagle3):
  """P-EAGLE: EAGLE-3 whose entries of tokens not drawn yet are masks.

  A mask is an entry made of the embedding of `mask_token_id` and of
  `mask_hidden`, a trained vector in place of the target's features. It is at
  the next position and sees all entries before it. A pass over the entries that
  the previous round's tokens allow, and over K - 1 masks, gives all drafts; the
  masks' keys and values are dropped.

  It is loaded as it was trained elsewhere (`loading.load_drafter`); there is no
  objective for it.

  Attributes:
    mask_token_id: a token of the target.
    num_layers: the layers of the network. Those after the first are ordinary
      ones of `shape`.
    own_embedding: whether tokens are embedded by a matrix [D, V] among the
      drafter's parameters instead of by the target.
  """

  mask_token_id: int
  num_layers: settings.Count = 1
  own_embedding: settings.Flag = False
  _network = _PEagle

  def _check(self):
    super()._check()
    fields.check_mask(self.mask_token_id, self.model.vocab_size)

  def _begin(self, key, target_params):
    if self.own_embedding:
      raise ValueError(
        'own_embedding is for drafters that were trained elsewhere: load such '
        "a drafter, or give own_embedding = False for the target's embedding"
      )
    return super()._begin(key, target_params)

  @property
  def windows(self) -> tuple[int | None, ...]:
    if self.layer_config is None:
      # The target's own layers do not say which of these have a window.
      return (self.window,) * self.num_layers
    return tuple(map(self.shape.window, range(self.num_layers)))

  def slots(self, params, tokens, length, state):
    """See `steps.OnePass`: a pass over up to K + 1 entries and K - 1 masks."""
    (cache,), (features,) = state.caches, state.features
    most_new, num_masks = self._most_new, self.num_draft_tokens - 1
    place = jnp.arange(most_new + num_masks)
    # After a prompt of one token, zeros stand in for the feature.
    num_new = jnp.maximum(length - 1 - cache.length, 1)[:, None]
    is_mask = place >= num_new
    index = cache.length[:, None] + 1 + place
    found = indexing.at(tokens, jnp.minimum(index, length[:, None] - 1))
    known = jnp.pad(features[:, :most_new], ((0, 0), (0, num_masks), (0, 0)))
    outputs, cache = self._run(
      params,
      0,
      jnp.where(is_mask, self.mask_token_id, found),
      jnp.where(is_mask[..., None], self._mask(params, features), known),
      cache,
      num_kept=most_new,
    )
    index = num_new - 1 + jnp.arange(1 + num_masks)
    outputs = indexing.at(outputs, index)
    logits = self._logits(params, outputs, 0)
    cache = cache_lib.commit(cache, jnp.maximum(length - 1, 0))
    return logits, dataclasses.replace(state, caches=(cache,))

  def _mask(self, params, features):
    """Returns what a mask has in place of features: [B, 1, D]."""
    parts = jnp.split(self.own(params)['mask_hidden'], len(self.feature_layers))
    of_rows = [jnp.broadcast_to(x, features[:, :1].shape) for x in parts]
    of_rows = [sharding.constrain(x, 'batch', None, None) for x in of_rows]
    return self.features(params, of_rows[0], tuple(of_rows))

  def _embed(self, params, tokens):
    if self.own_embedding:
      return self.merge(params).embed(tokens)
    return super()._embed(params, tokens)

  def _apply(self, module, embedded, features, contexts):
    rows, *first = module(embedded, features, *contexts[0])
    new = [first]
    for layer, context in zip(module.layers, contexts[1:], strict=True):
      rows, *of_layer = layer(rows, *context)
      new.append(of_layer)
    return rows, *zip(*new, strict=True)
