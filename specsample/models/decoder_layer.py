"""A layer of a decoder: attention and feed-forward."""

from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample.models import attention
from specsample.models import experts
from specsample.models import layers
from specsample.types import Array


class DecoderLayer(nnx.Module):
  """Pre-norm attention and feed-forward, each added to its input.

  `config` has the fields of `transformer.Transformer`. If its layers differ,
  `index` says which one this is; -1 stands for a layer after all of them.
  """

  def __init__(self, config, keys, index=-1):
    norm = lambda: layers.RMSNorm(
      *(config.dim, config.norm_eps, jnp.dtype(config.dtype)),
      offset=config.norm_offset,
    )
    after = norm if config.has_post_norms else lambda: None
    is_latent = config.latent is not None
    kind = attention.LatentAttention if is_latent else attention.Attention
    self.attention_norm = norm()
    self.attention: Any = kind(config, keys)
    self.attention_post_norm = after()
    self.mlp_norm = norm()
    self.mlp: Any = (
      layers.GatedMLP(config, keys)
      if config.experts is None or index in config.experts.dense_layers
      else experts.MoE(config, keys)
    )
    self.mlp_post_norm = after()

  def __call__(self, x, rope, mask, keys, values, attend_with=None):
    """Applies the layer to rows x [B * T, D]; see `attention.Attention`."""
    attended, new_keys, new_values = self.attention(
      self.attention_norm(x), rope, mask, keys, values, attend_with
    )
    x = x + normed(self.attention_post_norm, attended)
    fed = self.mlp(self.mlp_norm(x))
    return x + normed(self.mlp_post_norm, fed), new_keys, new_values


def normed(norm: Any, x: Array) -> Array:
  """Applies a norm to x, if there is one."""
  return x if norm is None else norm(x)
