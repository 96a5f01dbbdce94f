"""A layer of a decoder: attention or a recurrence, and feed-forward."""

import functools
from typing import Any

from flax import nnx
import jax.numpy as jnp

from specsample.models import attention
from specsample.models import experts as experts_lib
from specsample.models import gated_delta
from specsample.models import layers


class DecoderLayer(nnx.Module):
  """Pre-norm attention and feed-forward, each added to its input.

  `config` has the fields of `transformer.Transformer`. If its layers differ,
  `index` says which one this is; -1 stands for a layer after all of them, with
  keys and values of its own and no per-layer inputs.
  """

  def __init__(self, config, keys, index=-1):
    is_shared = index >= 0 and config.kv_source(index) != index
    config = config.of_layer(index)
    norm = lambda: layers.norm_of(config, config.dim)
    after = norm if config.has_post_norms else lambda: None
    experts = config.experts
    self.attention_norm = norm()
    recurrence: Any = None
    attend: Any = None
    if index in config.recurrent_layers:
      recurrence = gated_delta.GatedDelta(config, keys)
    elif config.latent is not None:
      attend = attention.LatentAttention(config, keys)
    else:
      attend = attention.Attention(config, keys, is_shared=is_shared)
    self.attention = attend
    self.delta = recurrence
    self.attention_post_norm = after()
    self.mlp_norm = norm()
    is_dense = experts is None or index in experts.dense_layers
    has_both = not is_dense and experts.is_beside_mlp
    feed = layers.GatedMLP if is_dense or has_both else experts_lib.MoE
    self.mlp: Any = feed(config, keys)
    self.mlp_post_norm = after()
    self.beside = _Beside(config, keys, norm) if has_both else None
    has_inputs = index >= 0 and config.layer_input_dim
    self.inputs = _LayerInputs(config, keys, norm) if has_inputs else None
    has_scalar = index >= 0 and config.has_layer_scalars
    one = jnp.ones(1, jnp.dtype(config.dtype))
    self.scalar = nnx.Param(one, axes=(None,)) if has_scalar else None

  def __call__(
    self, x, rope, mask, keys, values, attend_with=None, *, layer_input=None
  ):
    """Applies the layer to rows x [B * T, D]; see `attention.Attention`.

    `layer_input` [B * T, P] is what the layer reads of its own embedding.
    """
    attended, new_keys, new_values = self.attention(
      self.attention_norm(x), rope, mask, keys, values, attend_with
    )
    return self._fed(x, attended, layer_input), new_keys, new_values

  def recur(self, x, order, state, *, layer_input=None):
    """Applies a recurrent layer; see `gated_delta.GatedDelta`."""
    mixed, log = self.delta(self.attention_norm(x), order, state)
    return self._fed(x, mixed, layer_input), log

  def _fed(self, x, mixed, layer_input):
    x = x + layers.normed(self.attention_post_norm, mixed)
    fed = self.mlp(self.mlp_norm(x))
    if self.beside is not None:
      fed = self.beside(x, fed)
    x = x + layers.normed(self.mlp_post_norm, fed)
    if self.inputs is not None:
      x = x + self.inputs(x, layer_input)
    if self.scalar is not None:
      x = x * self.scalar[...]
    return x


class _Beside(nnx.Module):
  """Experts whose output is added to a feed-forward's, each after a norm."""

  def __init__(self, config, keys, norm):
    self.mlp_norm = norm()
    self.norm_before = norm()
    self.experts = experts_lib.MoE(config, keys)
    self.norm_after = norm()

  def __call__(self, x, of_mlp):
    """Returns the sum [R, D], given what both read and the output of one."""
    of_experts = self.experts(self.norm_before(x), routed_by=x)
    return self.mlp_norm(of_mlp) + self.norm_after(of_experts)


class _LayerInputs(nnx.Module):
  """The term that a layer adds from its own embedding (Gemma 3n, Gemma 4)."""

  def __init__(self, config, keys, norm):
    dim, size = config.dim, config.layer_input_dim
    linear = functools.partial(
      layers.Linear, keys=keys, dtype=jnp.dtype(config.dtype)
    )
    self.gate = linear(dim, size, axes=(None, None))
    self.out = linear(size, dim, axes=(None, None))
    self.norm = norm()
    self.activation = config.activation

  def __call__(self, x, layer_input):
    """Maps x [R, D] and the inputs [R, P] to [R, D]."""
    opened = layers.ACTIVATIONS[self.activation](self.gate(x))
    return self.norm(self.out(opened * layer_input))
