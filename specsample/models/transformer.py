"""A decoder-only transformer: Llama and, by configuration, other families.

Touvron et al., 2307.09288; Dubey et al., 2407.21783; Jiang et al., 2310.06825.
"""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import checks
from specsample import sharding
from specsample import types
from specsample.models import attention
from specsample.models import cache as cache_lib
from specsample.models import config as config_lib
from specsample.models import decoder_layer
from specsample.models import experts as experts_lib
from specsample.models import gated_delta
from specsample.models import int8
from specsample.models import layer_embedding
from specsample.models import layers
from specsample.models import masks
from specsample.models import matrices
from specsample.models import network
from specsample.models import rotary
from specsample.models import shadow as shadow_lib
from specsample.types import Array, ModelOutput, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
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

  vocab_size: int
  num_layers: int
  dim: int
  num_heads: int
  num_kv_heads: int
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
  activation: str = 'silu'
  norm_offset: float = 0.0
  has_wide_norms: bool = False
  has_post_norms: bool = False
  embedding_scale: float | None = None
  sliding_window: int | None = None
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

  def __post_init__(self):
    """Raises ValueError for invalid sizes, activations and dtypes."""
    checks.counts(
      self, ('vocab_size', 'num_layers', 'dim', 'num_heads', 'num_kv_heads')
    )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads is {self.num_heads} and num_kv_heads is '
        f'{self.num_kv_heads}: each key-value head must serve the same number '
        'of heads'
      )
    if self.num_tokens is not None and not (
      1 <= self.num_tokens <= self.vocab_size
    ):
      raise ValueError(
        f'num_tokens is {self.num_tokens} and vocab_size is {self.vocab_size}: '
        'give a number from 1 to vocab_size, or None for the whole vocabulary'
      )
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(
        f'sliding_window is {self.sliding_window}: give at least 1, because a '
        'token sees itself, or None for no window'
      )
    if self.activation not in layers.ACTIVATIONS:
      raise ValueError(
        f'activation is {self.activation!r}: give one of '
        f'{list(layers.ACTIVATIONS)}'
      )
    if len(self.recurrent_layers) >= self.num_layers:
      raise ValueError(
        f'delta.layers names all {self.num_layers} layers: at least one must '
        'have attention'
      )
    for name in ('has_sinks', 'has_output_gate', 'num_shared'):
      value = getattr(self, name)
      if self.latent is not None and value:
        raise ValueError(
          f'{name} is {value}, which attention over latent vectors does not '
          f'support: leave {name} or latent out'
        )
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
        f'{layer}, {window}: share fewer layers'
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
    return network.init(_Network, self, key)

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating them."""
    return network.abstract_params(_Network, self)

  def param_axes(self) -> Params:
    """Returns a tuple of `sharding.Axes` per parameter, one for each axis."""
    return network.param_axes(_Network, self)

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> cache_lib.KVCache:
    """See `types.Model`; layers with a window hold it and `max_new` tokens."""
    sizes = [
      max_length
      if max_new is None or (window := self.window(i)) is None
      else min(max_length, window + max_new)
      for i in range(self.num_layers)
    ]
    dtype = jnp.dtype('int8' if self.has_int8_cache else self.dtype)
    if self.latent is None:
      keys, values = (
        tuple(
          self._entries(i, batch_size, size, dtype)
          for i, size in enumerate(sizes)
        )
        for _ in range(2)
      )
    else:
      width = self.latent.kv_rank + self.latent.rope_dim
      keys = tuple(
        cache_lib.entries(batch_size, size, 1, width, dtype) for size in sizes
      )
      values = (None,) * self.num_layers
    without = lambda entries: tuple(
      None if i in self.recurrent_layers else of_layer
      for i, of_layer in enumerate(entries)
    )
    return cache_lib.KVCache(
      keys=without(keys),
      values=without(values),
      length=cache_lib.no_tokens(batch_size),
      rings=tuple(i for i, size in enumerate(sizes) if size < max_length),
      states=self._empty_states(batch_size) if max_length else (),
    )

  def _empty_states(self, batch_size):
    delta, dtype = self.delta, jnp.dtype(self.dtype)
    if delta is None:
      return ()
    return tuple(
      gated_delta.empty(batch_size, delta, dtype) if i in delta.layers else None
      for i in range(self.num_layers)
    )

  def _entries(self, layer, batch_size, size, dtype):
    if self.kv_source(layer) != layer:
      return None
    like = self.of_layer(layer)
    return cache_lib.entries(
      batch_size, size, like.num_kv_heads, like.head_dim, dtype
    )

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
    missing = [i for i in features if i not in there]
    if missing and isinstance(missing[0], types.KeysAndValues):
      raise ValueError(
        f'features are {features}, but the model has no keys and values of '
        f'layer {missing[0].layer}: name a layer that has its own'
      )
    if missing:
      raise ValueError(
        f'features are {features}, but the model has no layer {missing[0]}: '
        f'name outputs of layers 0 to {self.num_layers - 1}, or the embedding '
        'as -1'
      )
    made = network.merge(_Network, self, params)
    found = params['norm']['scale'].dtype
    if found != jnp.dtype(self.dtype):
      raise ValueError(
        f'the parameters are {found}, but the model computes in {self.dtype}: '
        'load both with the same dtype'
      )
    return made(tokens, cache, features, parents)

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
    return network.merge(_Network, self, params).embed(ids)

  def unembed(self, params: Params, hidden: Array) -> Array:
    return network.merge(_Network, self, params).unembed(hidden)

  def unembed_at(self, params: Params, hidden: Array, ids: Array) -> Array:
    return network.merge(_Network, self, params).unembed_at(hidden, ids)

  def shadow(self, params: Params) -> shadow_lib.Shadow:
    made = network.merge(_Network, self, params)
    return shadow_lib.of_matrix(made.kernel, made.vocab_axis)

  def shadow_axes(self) -> shadow_lib.Shadow:
    """Returns the `sharding.Axes` of a shadow's arrays."""
    return shadow_lib.axes(sharding.Axis('vocab', self.vocab_size))

  def is_shadow(self, shadow: shadow_lib.Shadow, params: Params) -> bool:
    made = network.merge(_Network, self, params)
    return shadow_lib.is_of(shadow, made.kernel)

  def bounds(
    self, params: Params, shadow: shadow_lib.Shadow, hidden: Array
  ) -> tuple[Array, Array]:
    return network.merge(_Network, self, params).bounds(shadow, hidden)

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


# The largest error of tanh: XLA's is right to a few units of float32.
_ROUNDING_OF_TANH = 2.0**-20


class _Network(nnx.Module):
  def __init__(self, config: Transformer, keys):
    dtype = jnp.dtype(config.dtype)
    self.vocab_axis = sharding.Axis('vocab', config.vocab_size)
    # The lookup also uses [D, V]: tied weights exist once, and the product that
    # reads all of them gets the fast layout.
    vocabulary = lambda: layers.Linear(
      config.dim,
      config.vocab_size,
      axes=(None, self.vocab_axis),
      keys=keys,
      dtype=dtype,
    )
    self.embedding = vocabulary().kernel
    self.unembedding = None if config.tie_embeddings else vocabulary().kernel
    self.layer_inputs = (
      layer_embedding.LayerEmbedding(config, keys)
      if config.layer_input_dim
      else None
    )
    self.layers = nnx.List(
      [
        decoder_layer.DecoderLayer(config, keys, i)
        for i in range(config.num_layers)
      ]
    )
    self.norm = layers.norm_of(config, config.dim)
    self.config = config

  def embed(self, ids):
    scale, dtype = self.config.embedding_scale, jnp.dtype(self.config.dtype)
    table = self.embedding.get_value()
    found = matrices.lookup(table, ids, self.vocab_axis, dtype)
    return found if scale is None else found * jnp.asarray(scale, dtype)

  @property
  def kernel(self):
    """The unembedding [D, V]."""
    own = self.embedding if self.unembedding is None else self.unembedding
    return own.get_value()

  def unembed(self, hidden):
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = matrices.product(
      *(rows, self.kernel, ('batch', self.vocab_axis), jnp.float32)
    )
    return self._finish(logits).reshape(*hidden.shape[:-1], -1)

  def unembed_at(self, hidden, ids):
    vectors = matrices.lookup(self.kernel, ids, self.vocab_axis, hidden.dtype)
    logits = jnp.einsum(
      *('...d,...nd->...n', hidden, vectors),
      preferred_element_type=jnp.float32,
    )
    return self._finish(logits, ids)

  def bounds(self, shadow, hidden):
    rows = hidden.reshape(-1, hidden.shape[-1])
    upper, rounding = shadow_lib.bounds(shadow, rows, self.vocab_axis)
    upper = self._finish(upper)
    cap = self.config.logit_softcap
    if cap is not None:
      # The cap brings logits no further apart, but tanh is rounded too.
      of_cap = cap * _ROUNDING_OF_TANH
      upper, rounding = upper + of_cap, rounding + of_cap
    of_nodes = lambda x: x.reshape(*hidden.shape[:-1], -1)
    return of_nodes(upper), of_nodes(rounding)

  def _finish(self, logits, ids=None):
    """Caps logits [..., n] of the tokens `ids`, by default all."""
    cap = self.config.logit_softcap
    if cap is not None:
      logits = cap * jnp.tanh(logits / cap)
    if self.config.num_tokens is not None:
      ids = jnp.arange(logits.shape[-1]) if ids is None else ids
      logits = jnp.where(ids < self.config.num_tokens, logits, -jnp.inf)
    return logits

  def __call__(self, tokens, cache, features, parents):
    batch, num_new = tokens.shape
    view = functools.cache(
      functools.partial(self._view, cache.length, num_new, parents)
    )
    x = self.embed(tokens).reshape(batch * num_new, -1)
    inputs: Any = (None,) * len(self.layers)
    if self.layer_inputs is not None:
      inputs = self.layer_inputs(tokens, x)
    states = cache.states or (None,) * len(self.layers)
    order, logs = None, [None] * len(self.layers)
    if self.config.is_recurrent:
      order = gated_delta.order(batch, num_new, parents)
    # Indexed by the layer that reads them: outputs[i + 1] is that of layer i.
    new_keys: list[Any] = []
    new_values: list[Any] = []
    outputs = [x]
    for i, (layer, of_layer) in enumerate(
      zip(self.layers, inputs, strict=True)
    ):
      if layer.delta is not None:
        x, logs[i] = _recur(
          *(*nnx.split(layer), x, order, states[i]), layer_input=of_layer
        )
        new_keys.append(None)
        new_values.append(None)
        outputs.append(x)
        continue
      source = self.config.kv_source(i)
      keys, values = cache.keys[source], cache.values[source]
      rope, mask = view(cache_lib.size(keys), self.config.window(i))
      if source != i:
        keys, values = (keys, new_keys[source]), (values, new_values[source])
      x, layer_keys, layer_values = _read_layer(
        *(*nnx.split(layer), x, rope, mask, keys, values),
        layer_input=of_layer,
      )
      new_keys.append(layer_keys)
      new_values.append(layer_values)
      outputs.append(x)
    unflatten = lambda y: y.reshape(batch, num_new, -1)
    hidden = unflatten(self.norm(x))
    output = ModelOutput(
      logits=self.unembed(hidden),
      hidden=hidden,
      features=tuple(
        _keys_and_values(new_keys[i.layer], new_values[i.layer], x.dtype)
        if isinstance(i, types.KeysAndValues)
        else unflatten(outputs[i + 1])
        for i in features
      ),
    )
    return output, cache_lib.New(
      keys=tuple(new_keys),
      values=tuple(new_values),
      after=hidden[:, 0],
      logs=tuple(logs) if self.config.is_recurrent else (),
    )

  def _view(self, length, num_new, parents, size, window):
    """Returns the rotary tables and the mask for a cache size and a window."""
    if parents is None:
      positions = length[:, None] + jnp.arange(num_new)
      mask = masks.causal(length, num_new, size, window)
    else:
      mask, positions = masks.of_tree(length, num_new, size, parents, window)
    return self.config.rope(positions, window), mask


def _keys_and_values(keys, values, dtype):
  """Stacks keys and values of [B, H, T, head_dim] to [B, T, 2, H, head_dim]."""
  both = jnp.stack([int8.dense(x, dtype) for x in (keys, values)], axis=1)
  return jnp.moveaxis(both, 3, 1)


@functools.partial(jax.jit, static_argnames='definition', inline=True)
def _read_layer(definition, variables, *args, **kwargs):
  """Calls a layer that `nnx.split` took apart.

  Layers that are alike are traced once (measured: four passes of SmolLM2 are
  ready from the compilation cache after 6.4 instead of 7.4 s). The call is
  inlined, because otherwise XLA rounded bfloat16 differently in passes of
  different widths.
  """
  return nnx.merge(definition, variables)(*args, **kwargs)


@functools.partial(jax.jit, static_argnames='definition', inline=True)
def _recur(definition, variables, *args, **kwargs):
  return nnx.merge(definition, variables).recur(*args, **kwargs)
