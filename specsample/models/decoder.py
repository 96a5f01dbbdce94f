"""A decoder-only transformer as a network: its layers and their caches."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample import types
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import gated_delta
from specsample.models import int8
from specsample.models import layers
from specsample.models import masks
from specsample.models import matrices
from specsample.models import shadow as shadow_lib
from specsample.types import ModelOutput

# The largest error of tanh: XLA's is right to a few units of float32.
_ROUNDING_OF_TANH = 2.0**-20


class Decoder(nnx.Module):
  """Embedding, layers, the last norm and unembedding.

  `config` is a `transformer.Transformer`.
  """

  def __init__(self, config, keys):
    dtype = jnp.dtype(config.dtype)
    self.vocab_axis = sharding.Axis('vocab', config.vocab_size)
    # The lookup also uses [D, V]: tied weights exist once, and the product that
    # reads all of them gets the fast layout.
    linear = functools.partial(
      layers.Linear, axes=(None, self.vocab_axis), keys=keys, dtype=dtype
    )
    vocabulary = lambda: linear(config.dim, config.vocab_size).kernel
    self.embedding = vocabulary()
    self.unembedding = None if config.tie_embeddings else vocabulary()
    has_inputs = config.layer_input_dim > 0
    self.layer_inputs = _LayerEmbedding(config, keys) if has_inputs else None
    layer = functools.partial(decoder_layer.DecoderLayer, config, keys)
    self.layers = nnx.List(map(layer, range(config.num_layers)))
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
    axes = 'batch', self.vocab_axis
    logits = matrices.product(rows, self.kernel, axes, jnp.float32)
    return self._finish(logits).reshape(*hidden.shape[:-1], -1)

  def unembed_at(self, hidden, ids):
    vectors = matrices.lookup(self.kernel, ids, self.vocab_axis, hidden.dtype)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    return self._finish(dot('...d,...nd->...n', hidden, vectors), ids)

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
    none: list[Any] = [None] * len(self.layers)
    inputs = none
    if self.layer_inputs is not None:
      inputs = self.layer_inputs(tokens, x)
    states, order = cache.states or none, None
    if self.config.is_recurrent:
      order = gated_delta.order(batch, num_new, parents)
    new_keys, new_values, logs = [*none], [*none], [*none]
    outputs = [x]  # of layer i at i + 1
    for i, layer in enumerate(self.layers):
      definition, variables = nnx.split(layer)
      if layer.delta is not None:
        x, logs[i] = _recur(
          definition, variables, x, order, states[i], layer_input=inputs[i]
        )
        outputs.append(x)
        continue
      source = self.config.kv_source(i)
      keys, values = cache.keys[source], cache.values[source]
      rope, mask = view(cache_lib.size(keys), self.config.window(i))
      if source != i:
        keys, values = (keys, new_keys[source]), (values, new_values[source])
      rest = rope, mask, keys, values
      x, new_keys[i], new_values[i] = _read_layer(
        definition, variables, x, *rest, layer_input=inputs[i]
      )
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


class _LayerEmbedding(nnx.Module):
  """An embedding of each token for each layer, as in Gemma 3n and Gemma 4.

  It is a table of all layers' embeddings, and a projection of the model's own.
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
