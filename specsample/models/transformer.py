"""The Llama family: Transformer 2 and 3, SmolLM2, Mistral.

Touvron et al., 2307.09288; Dubey et al., 2407.21783; Jiang et al., 2310.06825.
"""

import dataclasses

from flax import nnx
import jax.numpy as jnp

from specsample import sharding
from specsample.models import cache as cache_lib
from specsample.models import layers
from specsample.models import masks
from specsample.models import network
from specsample.models import rotary
from specsample.types import Array, ModelOutput, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
  """A decoder, by default Llama's, as a `types.Model`. Sizes are in elements."""

  vocab_size: int
  num_layers: int
  dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_length: int
  rope_theta: float = 10_000.0
  rope_scaling: (
    rotary.LinearRope | rotary.FactorRope | rotary.Llama3Rope | None
  ) = None
  norm_eps: float = 1e-5
  tie_embeddings: bool = False
  attention_bias: bool = False  # of all four of its products
  sliding_window: int | None = None
  dtype: str = 'float32'

  def __post_init__(self):
    """Refuses heads that cannot be shared out, and an empty window."""
    if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}: '
        'each key-value head serves the same number of heads'
      )
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(
        f'sliding_window is {self.sliding_window}: a token sees at least '
        'itself; None is no window'
      )

  def init(self, key: Array) -> Params:
    """Random parameters: nested dictionaries of arrays in `dtype`."""
    return network.init(_Network, self, key)

  def abstract_params(self) -> Params:
    """The parameters' shapes and dtypes, nothing allocated."""
    return network.abstract_params(_Network, self)

  def param_axes(self) -> Params:
    """The `sharding.Axes` of each parameter's axes, a tuple each."""
    return network.param_axes(_Network, self)

  def init_cache(self, batch_size: int, max_length: int) -> cache_lib.KVCache:
    """See `types.Model`."""
    return cache_lib.init(
      batch_size,
      max_length,
      self.num_layers,
      self.num_kv_heads,
      self.head_dim,
      jnp.dtype(self.dtype),
    )

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: cache_lib.KVCache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, cache_lib.KVCache]:
    """See `types.Model`."""
    there = range(-1, self.num_layers)
    missing = [i for i in features if i not in there]
    if missing:
      raise ValueError(
        f'features are {features}, and the model has no layer {missing[0]}: '
        f'name outputs of layers 0 to {self.num_layers - 1}, or the embedding '
        'as -1'
      )
    found = params['embedding'].dtype
    if found != jnp.dtype(self.dtype):
      raise ValueError(
        f'the parameters are {found} and the model computes in {self.dtype}: '
        'load both with one dtype'
      )
    made = network.merge(_Network, self, params)
    return made(tokens, cache, features, parents)

  def commit(
    self,
    cache: cache_lib.KVCache,
    length: Array,
    path: Array | None = None,
  ) -> cache_lib.KVCache:
    """See `types.Model`."""
    return cache_lib.commit(cache, length, path)

  def embed(self, params: Params, ids: Array) -> Array:
    """See `types.Model`."""
    return network.merge(_Network, self, params).embed(ids)

  def unembed(self, params: Params, hidden: Array) -> Array:
    """See `types.Model`."""
    return network.merge(_Network, self, params).unembed(hidden)

  def keep_layers(self, indices: tuple[int, ...]) -> 'Transformer':
    """The same model with a subset of its layers; see `keep_params`."""
    return dataclasses.replace(self, num_layers=len(indices))

  def keep_params(self, params: Params, indices: tuple[int, ...]) -> Params:
    """The parameters of `keep_layers(indices)`, shared, nothing copied."""
    kept = {i: params['layers'][index] for i, index in enumerate(indices)}
    return params | {'layers': kept}


class _Network(nnx.Module):
  def __init__(self, config: Transformer, keys):
    dtype = jnp.dtype(config.dtype)
    # [D, V] also for the lookup: tied weights exist once, and the product
    # that reads all of them gets the fast layout.
    self.vocab_axis = sharding.Axis('vocab', config.vocab_size)
    vocabulary = lambda: (
      layers.Linear(
        config.dim,
        config.vocab_size,
        axes=(None, self.vocab_axis),
        keys=keys,
        dtype=dtype,
      ).kernel
    )
    self.embedding = vocabulary()
    self.unembedding = None if config.tie_embeddings else vocabulary()
    self.layers = nnx.List(
      [layers.DecoderLayer(config, keys) for _ in range(config.num_layers)]
    )
    self.norm = layers.RMSNorm(config.dim, config.norm_eps, dtype)
    self.config = config

  def embed(self, ids):
    return sharding.lookup(self.embedding[...], ids, self.vocab_axis)

  def unembed(self, hidden):
    kernel = self.embedding if self.unembedding is None else self.unembedding
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = sharding.einsum(
      'rd,dv->rv',
      rows,
      kernel[...],
      axes=('batch', self.vocab_axis),
      preferred_element_type=jnp.float32,
    )
    return logits.reshape(*hidden.shape[:-1], -1)

  def __call__(self, tokens, cache, features, parents):
    config = self.config
    batch, num_new = tokens.shape
    sizes = (cache.length, num_new, cache.keys[0].shape[2])
    window = config.sliding_window
    if parents is None:
      positions = cache.length[:, None] + jnp.arange(num_new)
      mask = masks.causal(*sizes, window)
    else:
      mask, positions = masks.of_tree(*sizes, parents, window)
    rope = rotary.tables(
      positions, config.head_dim, config.rope_theta, config.rope_scaling
    )
    x = self.embed(tokens).reshape(batch * num_new, -1)
    # By the layer that they enter: outputs[i + 1] is that of layer i.
    new_keys, new_values, outputs = [], [], [x]
    for layer, keys, values in zip(
      self.layers, cache.keys, cache.values, strict=True
    ):
      x, layer_keys, layer_values = layer(x, rope, mask, keys, values)
      new_keys.append(layer_keys)
      new_values.append(layer_values)
      outputs.append(x)
    unflatten = lambda y: y.reshape(batch, num_new, -1)
    hidden = unflatten(self.norm(x))
    output = ModelOutput(
      logits=self.unembed(hidden),
      hidden=hidden,
      features=tuple(unflatten(outputs[i + 1]) for i in features),
    )
    cache = cache_lib.append(cache, new_keys, new_values, after=hidden[:, 0])
    return output, cache
