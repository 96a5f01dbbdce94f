"""The network of block drafters: a small decoder that reads masks."""

from collections.abc import Sequence
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import parts
from specsample.drafters import vocabulary
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import masks
from specsample.models import network
from specsample.types import Array


class Network(nnx.Module):
  """A small decoder whose context is made from the target's features.

  The context consists of keys and values. A token that is not known yet is
  represented by a vector, `mask`. It is trained, because not every target has
  an unused token; with a `mask_token_id` it is the target's embedding of that
  token, as in the paper, and stays fixed.
  """

  def __init__(self, config, keys):
    model = dataclasses.replace(config.shape, dtype='float32')
    self.feature_norms = parts.FeatureNorms(config)
    size = len(config.feature_layers) * model.dim
    self.width = sharding.Axis('mlp', size)
    self.fuse = parts.linear(size, model.dim, keys, (self.width, None))
    self.fused_norm = parts.norm(model)
    scale = model.dim**-0.5  # that of an untrained embedding
    mask = scale * jax.random.normal(next(keys), (model.dim,))
    is_fixed = config.mask_token_id is not None
    self.mask = (network.Buffer if is_fixed else nnx.Param)(mask, axes=(None,))
    self.layers = nnx.List(
      [self._layer(config, model, keys) for _ in range(config.num_layers)]
    )
    self.norm = parts.norm(model)
    self.vocabulary = vocabulary.make(config)
    self.drafts_from_pending = config.drafts_from_pending
    self.causal_layers = config.causal_layers
    self.config = model

  def context(
    self, features: Sequence[Array], positions: Array
  ) -> tuple[list[Array], list[Array]]:
    """Returns keys and values of [B, H, T, head_dim], one of each per layer.

    Args:
      features: [B, T, D] each, one for each layer of the target that is read.
      positions: [B, T] int32, of the tokens.
    """
    rows = jnp.concatenate(self.feature_norms(features), axis=-1)
    rows = rows.reshape(-1, rows.shape[-1])
    rows = sharding.constrain(rows, 'batch', self.width)
    fused = self.fused_norm(self.fuse(rows))
    rope = functools.cache(functools.partial(self.config.rope, positions))
    keys, values = [], []
    for i, layer in enumerate(self.layers):
      new = layer.attention.keys_and_values(
        fused, rope(self.config.window(i)), features[0].shape[0]
      )
      keys.append(new[0])
      values.append(new[1])
    return keys, values

  def __call__(
    self,
    first: Array,
    start: Array,
    num_drafts: int,
    context: cache_lib.KVCache,
    begin: Array | None = None,
  ) -> Array:
    """Returns what the unembedding reads for each draft: [B, n, K, D].

    Args:
      first: [B, n, D], embeddings of the first tokens of n blocks per row.
      start: [B, n] int32, their places. A block sees the context before.
      num_drafts: K.
      context: holds what the method `context` returns.
      begin: [B, n] int32, the places from which on the blocks see the context
        and from which positions count; 0 by default.
    """
    begin = jnp.zeros_like(start) if begin is None else begin
    batch, num_blocks, dim = first.shape
    num_masks = num_drafts - self.drafts_from_pending
    shape = (batch, num_blocks, num_masks, dim)
    unknown = jnp.broadcast_to(self.mask[...].astype(first.dtype), shape)
    unknown = sharding.constrain(unknown, 'batch', None, None, None)
    block = jnp.concatenate([first[:, :, None], unknown], axis=2)
    size = block.shape[2]
    positions = (start - begin)[..., None] + jnp.arange(size)
    rope = functools.cache(
      functools.partial(self.config.rope, positions.reshape(batch, -1))
    )

    @functools.cache
    def mask(num_entries, window, is_causal):
      seen_at = masks.indices(context.length, num_entries)
      return block_mask(start, size, seen_at, window, is_causal, begin)

    x = self._scaled(block).reshape(-1, dim)
    for i, (layer, keys, values) in enumerate(
      zip(self.layers, context.keys, context.values, strict=True)
    ):
      window = self.config.window(i)
      seen = mask(cache_lib.size(keys), window, i in self.causal_layers)
      x, _, _ = layer(x, rope(window), seen, keys, values)
    outputs = self.norm(x).reshape(batch, num_blocks, size, dim)
    return outputs[:, :, size - num_drafts :]

  def _layer(self, config, model, keys):
    del config
    return decoder_layer.DecoderLayer(model, keys)

  def _scaled(self, block):
    return block


def block_mask(
  start: Array,
  size: int,
  seen_at: Array,
  window: int | None = None,
  is_causal: bool = False,
  begin: Array | None = None,
) -> Array:
  """Returns what tokens of n blocks see: [B, T, S + T] bool, T = n * size.

  A token sees the context before its block, and all of its own block.

  Args:
    start: [B, n] int32, the places of the blocks.
    size: the number of tokens in a block.
    seen_at: [B, S] int32, the places of the context's entries, negative for
      empty ones.
    window: if given, a token sees the last `window` tokens, itself included, as
      in `masks.causal`, and the `window` - 1 tokens after it.
    is_causal: whether a token sees no later tokens of its block.
    begin: [B, n] int32, the first places that the blocks see; 0 by default.
  """
  batch, num_blocks = start.shape
  positions = start[..., None] + jnp.arange(size)  # [B, n, size]
  of_token = positions[..., None]
  seen_at = seen_at[:, None, None]  # [B, 1, 1, S]
  first = 0 if begin is None else begin[..., None, None]
  before = (seen_at >= first) & (seen_at < of_token[:, :, :1])
  before = jnp.tile(before, (1, 1, size, 1))
  block, slot = jnp.divmod(jnp.arange(num_blocks * size), size)
  own = block[:, None] == block
  ahead = slot - slot[:, None]
  if is_causal:
    own &= ahead <= 0
  if window is not None:
    before &= of_token - seen_at < window
    own &= jnp.abs(ahead) < window
  before = before.reshape(batch, -1, seen_at.shape[-1])
  own = jnp.broadcast_to(own, (batch, *own.shape))
  own = sharding.constrain(own, 'batch', None, None)
  return jnp.concatenate([before, own], axis=-1)
