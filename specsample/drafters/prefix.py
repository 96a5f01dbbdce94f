"""A decoder layer between a target and the heads that read it.

The prefix attention of Hydra++ (Ankner et al., 2402.05109).
"""

import dataclasses
from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.models import masks
from specsample.models import rotary
from specsample.types import Array


class PrefixLayer(nnx.Module):
  """One layer in the shape of `model`, over the target's last hidden vectors.

  It is initially the identity. By default no norm follows it: a norm would undo
  the scale that the target's unembedding expects.
  """

  def __init__(self, model: Any, keys, has_norm: bool = False):
    self.config = dataclasses.replace(model, dtype='float32')
    self.layer = decoder_layer.DecoderLayer(self.config, keys)
    for linear in (self.layer.attention.out, self.layer.mlp.down):
      linear.kernel = nnx.Param(
        jnp.zeros_like(linear.kernel[...]),
        axes=linear.kernel.get_metadata('axes'),
      )
    self.norm = (
      layers.RMSNorm(model.dim, model.norm_eps, jnp.float32)
      if has_norm
      else None
    )

  def __call__(
    self,
    hidden: Array,
    cache: cache_lib.KVCache,
    begins: Array | None = None,
  ) -> tuple[Array, cache_lib.KVCache]:
    """Returns the output for hidden [B, T, D] and the extended cache.

    Sequences begin at token begins [B, T], 0 by default.
    """
    config = self.config
    batch, num_new, dim = hidden.shape
    positions = cache.length[:, None] + jnp.arange(num_new)
    rope = rotary.tables(
      positions if begins is None else positions - begins,
      config.head_dim,
      config.rope_theta,
      config.rope_scaling,
    )
    mask = masks.causal(
      cache.length,
      num_new,
      cache.keys[0].shape[2],
      config.sliding_window,
      begins,
    )
    rows, keys, values = self.layer(
      hidden.reshape(-1, dim), rope, mask, cache.keys[0], cache.values[0]
    )
    if self.norm is not None:
      rows = self.norm(rows)
    output = rows.reshape(batch, num_new, dim)
    cache = cache_lib.append(cache, [keys], [values], after=output[:, 0])
    return output, cache


def init_cache(
  model: Any, batch_size: int, max_length: int, dtype: jnp.dtype
) -> cache_lib.KVCache:
  """Returns an empty cache of one layer."""
  return cache_lib.init(
    batch_size, max_length, 1, model.num_kv_heads, model.head_dim, dtype
  )
