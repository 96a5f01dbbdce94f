"""Parts of drafters' networks, and how their norms begin."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample import sharding
from specsample.models import layers
from specsample.models import transformer
from specsample.types import Array, Params


def linear(
  in_dim: int, out_dim: int, keys: Any, axes=(None, None), bias: bool = False
) -> layers.Linear:
  """Returns a linear map in float32, initially 0 if keys are None."""
  return layers.Linear(
    in_dim, out_dim, axes=axes, bias=bias, keys=keys, dtype=jnp.float32
  )


def norm(shape: Any, count: int = 1) -> layers.RMSNorm:
  """Returns a norm of `count` joined vectors of a `Transformer`'s width."""
  size, is_wide = count * shape.dim, shape.has_wide_norms
  return layers.RMSNorm(size, shape.norm_eps, jnp.float32, is_wide=is_wide)


class FeatureNorms(nnx.Module):
  """Norms that bring features of several layers to one scale, or none at all.

  The outputs of layers grow from layer to layer, and a few components are far
  larger than the rest: in SmolLM2-135M the median component of layers 1, 14 and
  26 is 1.3, 5.7 and 14, the largest are 42, 162 and 360, and those of the first
  token 25,000. If features are concatenated without norms, only the few large
  components of the late layer matter.

  `config` is a drafter with `feature_layers`, `has_feature_norms` and `shape`.
  """

  def __init__(self, config: Any):
    dim, eps = config.model.dim, config.shape.norm_eps
    layers_read = config.feature_layers if config.has_feature_norms else ()
    self.norms = nnx.List(
      [layers.RMSNorm(dim, eps, jnp.float32) for _ in layers_read]
    )

  def __call__(self, features: Sequence[Array]) -> list[Array]:
    """Normalises features [..., D]; without norms they are unchanged."""
    if not self.norms:
      return list(features)
    return [norm(x) for norm, x in zip(self.norms, features, strict=True)]


class Joined(nnx.Module):
  """A linear map from `count` concatenated vectors [n, D] to one vector."""

  def __init__(self, count: int, dim: int, bias: bool, keys):
    self.axis = sharding.Axis('mlp', count * dim)
    self.linear = linear(count * dim, dim, keys, (self.axis, None), bias)

  def __call__(self, *vectors: Array) -> Array:
    joined = jnp.concatenate(vectors, axis=1)
    return self.linear(sharding.constrain(joined, 'batch', self.axis))


def scale_of(model: Any, norm: Params) -> Array:
  """Returns the factor [D] float32 that a norm of a model multiplies by."""
  is_known = isinstance(model, transformer.Transformer)
  offset = model.norm_offset if is_known else 0
  return offset + jnp.array(norm['scale'], jnp.float32)


def with_norm_of(
  model: Any, params: Params, target_params: Params, offset: float = 0.0
) -> Params:
  """Returns a drafter's parameters with the last norm of its target, `model`.

  They are unchanged if the target's parameters are not given. `offset` is what
  the drafter adds to its norm's parameter. The unembedding is not trained, and
  expects the output of this norm.
  """
  if target_params is None:
    return params
  scale = scale_of(model, target_params['norm']) - offset
  return params | {'norm': {'scale': scale}}


def with_norms_of(
  drafter: Any, params: Params, target_params: Params
) -> Params:
  """Does the same as `with_norm_of`, also for a drafter's `FeatureNorms`.

  These begin as the norms of the target's readers: layer i + 1 reads the output
  of layer i through its first norm, and the unembedding reads that of the last
  layer through the last norm.
  """
  model = drafter.model
  if drafter.has_feature_norms and target_params is not None:
    layers = target_params['layers']
    readers = [layers[i]['attention_norm'] for i in range(len(layers))]
    readers.append(target_params['norm'])
    norms = {
      i: {'scale': scale_of(model, readers[layer + 1])}
      for i, layer in enumerate(drafter.feature_layers)
    }
    params |= {'feature_norms': {'norms': norms}}
  return with_norm_of(model, params, target_params)
