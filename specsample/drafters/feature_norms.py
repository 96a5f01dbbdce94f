"""Brings features of several layers to one scale before they are joined.

What a layer hands on grows from layer to layer, and holds a few components far
above the rest: in SmolLM2-135M of layers 1, 14 and 26 the median component is
1.3, 5.7 and 14, the largest ones 42, 162 and 360, and those of the first token
25,000. Joined as they are, the late layer's few are all that is seen.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample.models import layers
from specsample.types import Array, Params


class FeatureNorms(nnx.Module):
  """A norm for each of some features, or for none of them."""

  def __init__(self, count: int, dim: int, eps: float):
    self.norms = nnx.List(
      [layers.RMSNorm(dim, eps, jnp.float32) for _ in range(count)]
    )

  def __call__(self, features: Sequence[Array]) -> list[Array]:
    """Of features [..., D] each; as they are where there are no norms."""
    if not self.norms:
      return list(features)
    return [norm(x) for norm, x in zip(self.norms, features, strict=True)]


def scale_of(model: Any, norm: Params) -> Array:
  """What a norm of a model multiplies with, [D] float32."""
  return getattr(model, 'norm_offset', 0) + jnp.array(
    norm['scale'], jnp.float32
  )


def of_readers(
  model: Any, target_params: Params, feature_layers: Sequence[int]
) -> Params:
  """The parameters of norms that begin as those of the target's own readers.

  What layer i hands on, layer i + 1 reads through its first norm, and the
  unembedding of the last one through the last norm.
  """
  after = target_params['layers']

  def scale(layer):
    if layer + 1 == len(after):
      return scale_of(model, target_params['norm'])
    return scale_of(model, after[layer + 1]['attention_norm'])

  return {
    'norms': {
      i: {'scale': scale(layer)} for i, layer in enumerate(feature_layers)
    }
  }
