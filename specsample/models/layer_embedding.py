"""An embedding of each token for each layer, as in Gemma 3n and Gemma 4."""

import functools

from flax import nnx
import jax.numpy as jnp

from specsample import sharding
from specsample.models import layers


class LayerEmbedding(nnx.Module):
  """A table of all layers' embeddings, and a projection of the model's own.

  `config` has the fields of `transformer.Transformer`.
  """

  def __init__(self, config, keys):
    size = config.num_layers * config.layer_input_dim
    dtype = jnp.dtype(config.dtype)
    # Only looked up, so it need not be divided over the vocabulary.
    self.width = sharding.Axis('mlp', size)
    linear = functools.partial(
      layers.Linear, axes=(None, self.width), keys=keys, dtype=dtype
    )
    self.table = linear(config.vocab_size, size).kernel
    self.project = linear(config.dim, size)
    self.norm = layers.norm_of(config, config.layer_input_dim)
    self.config = config

  def __call__(self, tokens, embedded):
    """Returns what each layer reads: L of [B * T, P]."""
    config, dtype = self.config, embedded.dtype
    shape = len(embedded), config.num_layers, config.layer_input_dim
    whole = lambda x: sharding.reshape(
      sharding.constrain(x, 'batch', None), shape, 'batch', None, None
    )
    projected = self.project(embedded) * jnp.asarray(config.dim**-0.5, dtype)
    found = sharding.map_parts(
      lambda table, ids: jnp.take(table, ids, axis=0),
      (self.table.get_value(), tokens.reshape(-1)),
      ((None, self.width), ('batch',)),
      result=('batch', self.width),
    )
    found *= jnp.asarray(config.layer_input_dim**0.5, dtype)
    both = self.norm(whole(projected)) + whole(found)
    both *= jnp.asarray(2**-0.5, dtype)
    return [both[:, i] for i in range(config.num_layers)]
