"""Drafts with a module for multi-token prediction.

DeepSeek-V3 (2412.19437, section 2.2), its module of depth 1 applied to its own
outputs for every token but the first.
"""

import dataclasses

from flax import nnx
import jax.numpy as jnp

from specsample.drafters import feature_chain
from specsample.drafters import vocabulary
from specsample.models import layers
from specsample.types import Array, Params


class _Network(nnx.Module):
  def __init__(self, config, keys):
    model = dataclasses.replace(config.model, dtype='float32')
    norm = lambda: layers.RMSNorm(model.dim, model.norm_eps, jnp.float32)
    self.embedding_norm = norm()
    self.feature_norm = norm()
    self.project = feature_chain.Joined(2, model.dim, False, keys)
    self.layer = layers.DecoderLayer(model, keys)
    self.norm = norm()
    self.vocabulary = vocabulary.make(config)

  def __call__(self, embedded, features, *context):
    normed = self.embedding_norm(embedded), self.feature_norm(features)
    return self.layer(self.project(*normed), *context)

  def read(self, rows):
    return self.norm(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(feature_chain.FeatureChain):
  """A layer of the target's kind behind norms of what it joins.

  It joins [norm of the next token's embedding; norm of the hidden vector], in
  the order of the published weights. The unembedding is the target's, behind a
  norm that is at first the target's too.
  """

  _network = _Network

  def features(
    self, params: Params, hidden: Array, of_layers: tuple[Array, ...]
  ) -> Array:
    """See `feature_chain.FeatureChain`: the hidden vectors."""
    del params, of_layers
    return hidden

  def _begin(self, key, target_params):
    params = super()._begin(key, target_params)
    return feature_chain.with_norm_of(params, target_params)
