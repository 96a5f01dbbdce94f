"""Drafters with one layer that continues from the target's features.

EAGLE (Li et al., 2401.15077; as a chain also EAGLE-2, 2406.16858) and EAGLE-3
(Li et al., 2503.01840).
"""

import dataclasses

from flax import nnx
import jax.numpy as jnp

from specsample import settings
from specsample.drafters import feature_chain
from specsample.drafters import fields
from specsample.drafters import parts
from specsample.drafters import vocabulary
from specsample.models import attention
from specsample.models import layers


class _Layer(nnx.Module):
  """A layer of the target's shape without a norm before its attention."""

  def __init__(self, config, keys, in_dim):
    config = dataclasses.replace(config, dtype='float32')
    after = lambda: (
      layers.norm_of(config, config.dim) if config.has_post_norms else None
    )
    self.attention = attention.Attention(config, keys, in_dim)
    self.attention_post_norm = after()
    self.mlp_norm = parts.norm(config)
    self.mlp = layers.GatedMLP(config, keys)
    self.mlp_post_norm = after()

  def __call__(self, x, read, *context):
    attended, new_keys, new_values = self.attention(read, *context)
    x = x + layers.normed(self.attention_post_norm, attended)
    fed = self.mlp(self.mlp_norm(x))
    x = x + layers.normed(self.mlp_post_norm, fed)
    return x, new_keys, new_values


class _Eagle(nnx.Module):
  def __init__(self, config, keys):
    dim = config.model.dim
    self.project = parts.Joined(2, dim, config.bias, keys)
    self.layer = _Layer(config.shape, keys, dim)
    self.vocabulary = vocabulary.make(config)

  def __call__(self, embedded, features, *context):
    x = self.project(embedded, features)
    return self.layer(x, x, *context)

  def read(self, rows):
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle(feature_chain.FeatureChain):
  """EAGLE-1 and EAGLE-2: each output predicts the target's next hidden vector.

  A projection of [embedding of the next token; hidden vector], with `bias`,
  goes through one layer of the target's shape.
  """

  bias: settings.Flag = True
  _network = _Eagle

  def features(self, params, hidden, of_layers):
    del params, of_layers
    return hidden


class Eagle3Network(nnx.Module):
  def __init__(self, config, keys):
    dim, shape = config.model.dim, config.shape
    num_features = len(config.feature_layers)
    self.feature_norms = parts.FeatureNorms(config)
    self.joint_norm = (
      parts.norm(shape, num_features) if config.has_joint_norm else None
    )
    self.project = parts.Joined(num_features, dim, False, keys)
    self.embedding_norm = parts.norm(shape)
    self.feature_norm = parts.norm(shape)
    self.layer = _Layer(shape, keys, 2 * dim)
    self.norm = parts.norm(shape)
    self.vocabulary = vocabulary.make(config)
    self.norm_before_residual = config.norm_before_residual
    self.feeds_back_normed = config.feeds_back_normed

  def __call__(self, embedded, features, *context):
    normed = self.feature_norm(features)
    around = normed if self.norm_before_residual else features
    read = jnp.concatenate([self.embedding_norm(embedded), normed], axis=1)
    rows, keys, values = self.layer(around, read, *context)
    return self.norm(rows) if self.feeds_back_normed else rows, keys, values

  def fuse(self, features):
    features = self.feature_norms(features)
    if self.joint_norm is not None:
      features = [self.joint_norm(jnp.concatenate(features, axis=-1))]
    return self.project(*features)

  def read(self, rows):
    return rows if self.feeds_back_normed else self.norm(rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(feature_chain.FeatureChain):
  """EAGLE-3: continues from three layers' outputs, projected to one vector.

  The attention reads [norm of the embedding; norm of the vector], and the
  residual connection carries the vector itself. The norm before the
  unembedding, initially the target's own, is not applied to what is fed back.

  Attributes:
    feature_layers: layers of the target, -1 for its embedding. For a target of
      L layers the default is the inputs of layers 2, L // 2 and L - 3, as in
      the paper's code.
    has_feature_norms: whether each feature is normalised before the projection,
      initially as the target's layer that reads it does. Not in the paper.
    has_joint_norm: whether the features are normalised after they are joined.
      This and the next two are for drafters that `speculators` trains.
    norm_before_residual: whether the residual connection carries the norm of
      the vector.
    feeds_back_normed: whether the last norm is applied to what is fed back.
  """

  feature_layers: tuple[int, ...] = ()
  has_feature_norms: settings.Flag = False
  has_joint_norm: settings.Flag = False
  norm_before_residual: settings.Flag = False
  feeds_back_normed: settings.Flag = False
  _network = Eagle3Network

  def _check(self):
    super()._check()
    if not self.feature_layers:
      size = self.model.num_layers
      chosen = (1, size // 2 - 1, size - 4)
      fields.check_layers('feature_layers', chosen, size, -1)
      object.__setattr__(self, 'feature_layers', chosen)

  def features(self, params, hidden, of_layers):
    rows = [x.reshape(-1, x.shape[-1]) for x in of_layers]
    return self.merge(params).fuse(rows).reshape(hidden.shape)

  def _begin(self, key, target_params):
    params = super()._begin(key, target_params)
    return parts.with_norms_of(self, params, target_params)
