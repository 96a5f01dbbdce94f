"""A drafter with modules for multi-token prediction.

DeepSeek-V3 (2412.19437, section 2.2). The last module continues from its own
outputs, as is done with the single module that is published. Qwen3-Next and
Qwen3.5 have such a module too.
"""

import dataclasses
from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample import settings
from specsample.drafters import feature_chain
from specsample.drafters import fields
from specsample.drafters import parts
from specsample.drafters import vocabulary
from specsample.models import decoder_layer
from specsample.models import layers


class _Module(nnx.Module):
  def __init__(self, config, keys):
    model = dataclasses.replace(config.shape, dtype='float32')
    norm = lambda: layers.RMSNorm(
      model.dim, model.norm_eps, jnp.float32, offset=config.norm_offset
    )
    self.embedding_norm = norm()
    self.feature_norm = norm()
    self.project = parts.Joined(2, model.dim, False, keys)
    self.layer = decoder_layer.DecoderLayer(model, keys)
    self.norm = norm()
    self.feeds_back_normed = config.feeds_back_normed

  def __call__(self, embedded, features, *context):
    normed = self.embedding_norm(embedded), self.feature_norm(features)
    rows, keys, values = self.layer(self.project(*normed), *context)
    return self.norm(rows) if self.feeds_back_normed else rows, keys, values

  def read(self, rows):
    return rows if self.feeds_back_normed else self.norm(rows)


class _Network(nnx.Module):
  def __init__(self, config, keys):
    self.layers = nnx.List(
      [_Module(config, keys) for _ in range(config.num_modules)]
    )
    self.vocabulary = vocabulary.make(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTP(feature_chain.FeatureChain):
  """A drafter whose modules are layers like the target's, on normalised inputs.

  Module i joins [norm of the embedding of the token i + 1 ahead; norm of the
  hidden vector, or of the previous module's output], in the order of the
  published weights. The unembedding is the target's, after a norm that is
  initially the target's too.

  Attributes:
    num_modules: D. Draft token i comes from module min(i, D - 1); at most K
      modules are used.
    norm_offset: is added to the weights of the norms outside of the layer.
    feeds_back_normed: whether the last norm is applied to what is fed back.
  """

  num_modules: settings.Count = 1
  norm_offset: float = 0.0
  feeds_back_normed: settings.Flag = False
  _network = _Network

  @property
  def shape(self) -> Any:
    """The shape with latent attention and experts, unlike other drafters'."""
    return fields.alike(self.layer_config or self.model)

  def modules(self, params):
    return list(self.merge(params).layers)

  def features(self, params, hidden, of_layers):
    del params, of_layers
    return hidden

  def _begin(self, key, target_params):
    params = super()._begin(key, target_params)
    begun = {
      i: parts.with_norm_of(self.model, module, target_params, self.norm_offset)
      for i, module in params['layers'].items()
    }
    return params | {'layers': begun}
