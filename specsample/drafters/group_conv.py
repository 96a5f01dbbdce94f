"""Layers with short convolutions around attention and feed-forward.

Those of DFlash 2, as published by the authors of DFlash (2602.06036).
"""

from flax import nnx
import jax.numpy as jnp

from specsample import sharding
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.types import Array


class GroupConv(nnx.Module):
  """Convolutions along a block, before and after one of a layer's sublayers.

  `config` is a `dflash2.DFlash2`.

  Number c of token t becomes the sum, over taps i, of base[c, i] + change_t[i,
  c // group_size] times number c of token t - i, which is 0 before the block.
  Both convolutions take the changes from the sublayer's normalised input, and
  both begin as the identity.
  """

  def __init__(self, config):
    dim, num_taps = config.model.dim, config.conv_kernel_size
    base = jnp.zeros((dim, num_taps, 2)).at[:, 0].set(1)
    self.base = nnx.Param(base, axes=(None, None, None))
    self.projection = layers.Linear(
      dim,
      2 * num_taps * dim // config.conv_group_size,
      axes=(None, None),
      keys=None,
      dtype=jnp.float32,
    )
    self.block_size = config.num_draft_tokens + 1

  def kernels(self, normed: Array) -> tuple[Array, Array]:
    """Returns the kernels before and after the sublayer, [n, taps, D] each.

    Args:
      normed: [n, D], whole blocks of the sublayer's normalised inputs.
    """
    dim, num_taps, _ = self.base.shape
    changes = self.projection(normed)
    changes = changes.reshape(len(normed), 2, num_taps, -1)
    changes = jnp.repeat(changes, dim // changes.shape[-1], axis=-1)
    kernels = self.base[...].T + changes
    return kernels[:, 0], kernels[:, 1]

  def __call__(self, kernel: Array, x: Array) -> Array:
    """Convolves rows x [n, D] with a kernel from `kernels`."""
    size, dim = self.block_size, x.shape[-1]
    shape = (len(x) // size, size, dim)
    blocks = sharding.reshape(x, shape, 'batch', None, None)
    mixed = jnp.zeros_like(x)
    for i in range(kernel.shape[1]):
      before = jnp.pad(blocks, ((0, 0), (i, 0), (0, 0)))[:, :size]
      before = sharding.reshape(before, x.shape, 'batch', None)
      mixed += kernel[:, i] * before
    return mixed


class Layer(decoder_layer.DecoderLayer):
  """A layer of the draft network, whose sublayers have convolutions."""

  def __init__(self, config, model, keys):
    super().__init__(model, keys)
    self.attention_conv = GroupConv(config)
    self.mlp_conv = GroupConv(config)

  def __call__(
    self, x, rope, mask, keys, values, attend_with=None, *, layer_input=None
  ):
    """See `DecoderLayer`; the rows are those of whole blocks."""
    del layer_input
    conv = self.attention_conv
    normed = self.attention_norm(x)
    before, after = conv.kernels(normed)
    attended, new_keys, new_values = self.attention(
      conv(before, normed), rope, mask, keys, values, attend_with
    )
    x = x + conv(after, layers.normed(self.attention_post_norm, attended))
    conv = self.mlp_conv
    normed = self.mlp_norm(x)
    before, after = conv.kernels(normed)
    fed = self.mlp(conv(before, normed))
    fed = layers.normed(self.mlp_post_norm, fed)
    return x + conv(after, fed), new_keys, new_values
