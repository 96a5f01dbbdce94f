"""A decoder-only transformer: Llama and, by configuration, other families.

Touvron et al., 2307.09288; Dubey et al., 2407.21783; Jiang et al., 2310.06825.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample import types
from specsample.models import attention
from specsample.models import cache as cache_lib
from specsample.models import config as config_lib
from specsample.models import decoder
from specsample.models import experts as experts_lib
from specsample.models import gated_delta
from specsample.models import layers
from specsample.models import network
from specsample.models import rotary
from specsample.models import shadow as shadow_lib
from specsample.types import Array, ModelOutput, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer(settings.Settings):
  """A decoder-only `types.Model`, by default Llama. Sizes are in elements.

  Attributes:
    attention_bias: whether the projections to queries, keys and values have a
      bias.
    attention_out_bias: whether the projection after them has one.
    qk_norm: whether queries and keys are normalised per head (Qwen 3).
    query_scale: the factor for queries, head_dim**-0.5 if None.
    attention_softcap, logit_softcap: if set, scores and logits x become
      c * tanh(x / c) (Gemma 2).
    has_sinks: whether each head can attend to nothing, by a score of its own
      (gpt-oss).
    num_tokens: how many entries of the vocabulary, from the first, are tokens;
      the padding after them has no probability. All if None.
    activation: the feed-forward's, a name in `layers.ACTIVATIONS`.
    norm_offset: the value added to the norms' parameters (1 for Gemma).
    has_wide_norms: whether norms multiply by their parameters in float32 and
      round afterwards (gpt-oss, Gemma 4), as those with an offset always do.
    has_post_norms: whether the outputs of attention and feed-forward are
      normalised too (Gemma 2).
    embedding_scale: the factor for embeddings, rounded to `dtype`.
    sliding_window: how many tokens a token sees, itself included.
    sliding_layers: the layers with the window; all if None.
    full_head_dim, full_kv_heads: head_dim and num_kv_heads of the layers
      without the window, None if all layers are alike (Gemma 4).
    values_are_keys: whether the values of the layers without the window are
      made of the keys, before these are normalised and rotated.
    has_value_norm: whether values are divided by their root mean square.
    num_shared: how many layers, the last ones, read the keys and values of the
      last earlier layer with the same window, and have none of their own.
    shared_mlp_dim: mlp_dim of those layers, None if it is the same.
    layer_input_dim: the size of an embedding of each token for each layer, 0 if
      layers read none.
    has_layer_scalars: whether a layer's output is multiplied by a parameter.
    sliding_rope_theta: rope_theta of the layers with the window, whose rope is
      then not scaled. None if it is that of the others.
    latent: the settings of attention over latent vectors, which does not read
      num_kv_heads and head_dim, and has no sinks, output gate or shared layers.
    experts: the settings of layers with a mixture of experts.
    delta: the settings of recurrent layers; at least one layer has attention.
    has_output_gate: whether the output of attention is multiplied by the
      sigmoid of a projection of its input (Qwen 3.5).
    rotary_dim: how many dimensions of a head are rotated; all if None.
    has_int8_cache: whether keys and values are stored as 8-bit integers, with a
      scale for each vector.
    dtype: that of the parameters and of the computation. The parameters may
      also be the result of `int8.weights`.
  """

  vocab_size: settings.Count
  num_layers: settings.Count
  dim: settings.Count
  num_heads: settings.Count
  num_kv_heads: settings.Count
  head_dim: int
  mlp_dim: int
  max_length: int
  rope_theta: float = 10_000.0
  rope_scaling: rotary.Scaling | None = None
  norm_eps: float = 1e-5
  tie_embeddings: bool = False
  attention_bias: bool = False
  attention_out_bias: bool = False
  qk_norm: bool = False
  query_scale: float | None = None
  attention_softcap: float | None = None
  has_sinks: bool = False
  logit_softcap: float | None = None
  num_tokens: int | None = None
  activation: Annotated[str, settings.one_of(*layers.ACTIVATIONS)] = 'silu'
  norm_offset: float = 0.0
  has_wide_norms: bool = False
  has_post_norms: bool = False
  embedding_scale: float | None = None
  sliding_window: settings.Count | None = None
  sliding_layers: tuple[int, ...] | None = None
  sliding_rope_theta: float | None = None
  full_head_dim: int | None = None
  full_kv_heads: int | None = None
  values_are_keys: bool = False
  has_value_norm: bool = False
  num_shared: int = 0
  shared_mlp_dim: int | None = None
  layer_input_dim: int = 0
  has_layer_scalars: bool = False
  latent: attention.Latent | None = None
  experts: experts_lib.Experts | None = None
  delta: gated_delta.Delta | None = None
  has_output_gate: bool = False
  rotary_dim: int | None = None
  has_int8_cache: bool = False
  dtype: str = 'float32'

  def _check(self) -> None:
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads is {self.num_heads} and num_kv_heads is '
        f'{self.num_kv_heads}: each key-value head must serve the same number '
        'of heads'
      )
    num_tokens = self.num_tokens
    if num_tokens is not None and not 1 <= num_tokens <= self.vocab_size:
      raise ValueError(
        f'num_tokens is {num_tokens} and vocab_size is {self.vocab_size}: '
        'give a number from 1 to vocab_size, or None for the whole vocabulary'
      )
    if len(self.recurrent_layers) >= self.num_layers:
      raise ValueError(
        f'delta.layers names all {self.num_layers} layers: at least one must '
        'have attention'
      )
    for name, value in (
      ('has_sinks', self.has_sinks),
      ('has_output_gate', self.has_output_gate),
      ('num_shared', self.num_shared),
    ):
      if self.latent is not None and value:
        raise ValueError(
          f'{name} is {value}, which attention over latent vectors does not '
          f'support: leave {name} or latent out'
        )
    for layer in range(self.num_layers - self.num_shared, self.num_layers):
      self.kv_source(layer)
    # By its name, so that models are equal however the dtype was given.
    object.__setattr__(self, 'dtype', config_lib.dtype_name(self.dtype))

  @property
  def recurrent_layers(self) -> tuple[int, ...]:
    """The layers that have a state instead of attention."""
    return () if self.delta is None else self.delta.layers

  @property
  def is_recurrent(self) -> bool:
    """Whether each pass must be followed by a commit; see `gated_delta`."""
    return bool(self.recurrent_layers)

  @property
  def own_kv_layers(self) -> tuple[int, ...]:
    """The layers with keys and values of their own; none if `latent` is set."""
    if self.latent is not None:
      return ()
    num_own = self.num_layers - self.num_shared
    return tuple(i for i in range(num_own) if i not in self.recurrent_layers)

  def window(self, layer: int) -> int | None:
    """Returns how many tokens a layer sees, None for all."""
    if self.sliding_layers is None or layer in self.sliding_layers:
      return self.sliding_window
    return None

  def of_layer(self, layer: int) -> 'Transformer':
    """Returns the model if all its layers had the sizes of this one.

    The layer -1, after all others, has those of the layers with the window.
    """
    is_full = layer >= 0 and self.window(layer) is None
    is_shared = self.num_layers - self.num_shared <= layer
    return dataclasses.replace(
      self,
      head_dim=(is_full and self.full_head_dim) or self.head_dim,
      num_kv_heads=(is_full and self.full_kv_heads) or self.num_kv_heads,
      values_are_keys=is_full and self.values_are_keys,
      mlp_dim=(is_shared and self.shared_mlp_dim) or self.mlp_dim,
    )

  def kv_source(self, layer: int) -> int:
    """Returns the layer whose keys and values a layer reads."""
    num_own = self.num_layers - self.num_shared
    if layer < num_own:
      return layer
    window = self.window(layer)
    alike = [i for i in self.own_kv_layers if self.window(i) == window]
    if not alike:
      raise ValueError(
        f'num_shared is {self.num_shared}, but none of the first {num_own} '
        'layers has keys and values with the window of layer '
        f'{layer}, {window}: share fewer layers, or change sliding_layers'
      )
    return alike[-1]

  def rope(
    self, positions: Array, window: int | None = None
  ) -> tuple[Array, Array]:
    """Returns the tables of `rotary.rotate` for positions [B, T].

    `window` is how many tokens the layers see, None for all.
    """
    head_dim = self.latent.rope_dim if self.latent else self.head_dim
    if window is None and self.full_head_dim is not None:
      head_dim = self.full_head_dim
    head_dim = self.rotary_dim or head_dim
    theta, scaling = self.rope_theta, self.rope_scaling
    if window is not None and self.sliding_rope_theta is not None:
      theta, scaling = self.sliding_rope_theta, None
    return rotary.tables(positions, head_dim, theta, scaling)

  def init(self, key: Array) -> Params:
    """Returns random parameters: nested dictionaries of arrays in `dtype`."""
    return network.init(decoder.Decoder, self, key)

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating them."""
    return network.abstract_params(decoder.Decoder, self)

  def param_axes(self) -> Params:
    """Returns a tuple of `sharding.Axes` per parameter, one for each axis."""
    return network.param_axes(decoder.Decoder, self)

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> cache_lib.KVCache:
    """See `types.Model`; layers with a window hold it and `max_new` tokens."""
    more = max_length if max_new is None else max_new
    sizes = [
      min(max_length, (self.window(i) or max_length) + more)
      for i in range(self.num_layers)
    ]
    entries = lambda: tuple(
      self._entries(i, batch_size, size) for i, size in enumerate(sizes)
    )
    states: tuple[gated_delta.State | None, ...] = ()
    if self.delta is not None and max_length:
      dtype = jnp.dtype(self.dtype)
      states = tuple(
        gated_delta.empty(batch_size, self.delta, dtype)
        if i in self.delta.layers
        else None
        for i in range(self.num_layers)
      )
    return cache_lib.KVCache(
      keys=entries(),
      values=(None,) * self.num_layers if self.latent else entries(),
      length=cache_lib.no_tokens(batch_size),
      rings=tuple(i for i, size in enumerate(sizes) if size < max_length),
      states=states,
    )

  def _entries(self, layer, batch_size, size):
    """Returns room for a layer's keys or values; None if it has none."""
    if layer in self.recurrent_layers or self.kv_source(layer) != layer:
      return None
    like = self.of_layer(layer)
    heads, width = like.num_kv_heads, like.head_dim
    if self.latent is not None:
      heads, width = 1, self.latent.kv_rank + self.latent.rope_dim
    dtype = jnp.dtype('int8' if self.has_int8_cache else self.dtype)
    return cache_lib.entries(batch_size, size, heads, width, dtype)

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: cache_lib.KVCache,
    features: tuple[int | types.KeysAndValues, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, cache_lib.KVCache]:
    output, new = self.read(params, tokens, cache, features, parents)
    return output, self.append(cache, new)

  def read(
    self,
    params: Params,
    tokens: Array,
    cache: cache_lib.KVCache,
    features: tuple[int | types.KeysAndValues, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, cache_lib.New]:
    there = {
      *range(-1, self.num_layers),
      *map(types.KeysAndValues, self.own_kv_layers),
    }
    for feature in features:
      if feature in there:
        continue
      if isinstance(feature, types.KeysAndValues):
        raise ValueError(
          f'features are {features}, but the model has no keys and values of '
          f'layer {feature.layer}: name a layer that has its own'
        )
      raise ValueError(
        f'features are {features}, but the model has no layer {feature}: '
        f'name outputs of layers 0 to {self.num_layers - 1}, or the embedding '
        'as -1'
      )
    made = self._network(params)
    found = params['norm']['scale'].dtype
    if found != jnp.dtype(self.dtype):
      raise ValueError(
        f'the parameters are {found}, but the model computes in {self.dtype}: '
        'load both with the same dtype'
      )
    return made(tokens, cache, features, parents)

  def _network(self, params) -> decoder.Decoder:
    return network.merge(decoder.Decoder, self, params)

  def widen(self, new: cache_lib.New, num_tokens: int) -> cache_lib.New:
    return cache_lib.widen(new, num_tokens)

  def append(
    self,
    cache: cache_lib.KVCache,
    new: cache_lib.New,
    path: Array | None = None,
  ) -> cache_lib.KVCache:
    if path is not None:
      new = cache_lib.along(new, path)
    return cache_lib.append(
      cache, new.keys, new.values, after=new.after, logs=new.logs
    )

  def commit(
    self,
    cache: cache_lib.KVCache,
    length: Array,
    path: Array | None = None,
  ) -> cache_lib.KVCache:
    return cache_lib.commit(cache, length, path)

  def embed(self, params: Params, ids: Array) -> Array:
    return self._network(params).embed(ids)

  def unembed(self, params: Params, hidden: Array) -> Array:
    return self._network(params).unembed(hidden)

  def unembed_at(self, params: Params, hidden: Array, ids: Array) -> Array:
    return self._network(params).unembed_at(hidden, ids)

  def shadow(self, params: Params) -> shadow_lib.Shadow:
    made = self._network(params)
    return shadow_lib.of_matrix(made.kernel, made.vocab_axis)

  def shadow_axes(self) -> shadow_lib.Shadow:
    """Returns the `sharding.Axes` of a shadow's arrays."""
    return shadow_lib.axes(sharding.Axis('vocab', self.vocab_size))

  def is_shadow(self, shadow: shadow_lib.Shadow, params: Params) -> bool:
    return shadow_lib.is_of(shadow, self._network(params).kernel)

  def bounds(
    self, params: Params, shadow: shadow_lib.Shadow, hidden: Array
  ) -> tuple[Array, Array]:
    return self._network(params).bounds(shadow, hidden)

  def keep_layers(self, indices: tuple[int, ...]) -> 'Transformer':
    """Returns the model with a subset of its layers; see `keep_params`."""
    if self.layer_input_dim:
      raise ValueError(
        'the model has an embedding for each layer, so no subset of its layers '
        'can be kept: give a model whose layer_input_dim is 0'
      )
    kept = lambda some: tuple(
      i for i, index in enumerate(indices) if index in some
    )
    sliding, sparse, delta = self.sliding_layers, self.experts, self.delta
    if delta is not None:
      delta = dataclasses.replace(delta, layers=kept(delta.layers))
    if sparse is not None:
      dense = kept(sparse.dense_layers)
      sparse = dataclasses.replace(sparse, dense_layers=dense)
    num_own = self.num_layers - self.num_shared
    for index in indices:
      source = self.kv_source(index)
      if source not in indices:
        raise ValueError(
          f'layers are {indices}, but layer {index} reads the keys and values '
          f'of layer {source}: keep that layer too'
        )
    return dataclasses.replace(
      self,
      num_layers=len(indices),
      sliding_layers=None if sliding is None else kept(sliding),
      experts=sparse,
      num_shared=sum(index >= num_own for index in indices),
      delta=delta,
    )

  def keep_params(self, params: Params, indices: tuple[int, ...]) -> Params:
    """Returns the parameters of `keep_layers(indices)`, shared, not copied."""
    kept = {i: params['layers'][index] for i, index in enumerate(indices)}
    return params | {'layers': kept}
