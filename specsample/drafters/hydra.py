"""A drafter whose heads read the draft tokens before theirs.

Ankner et al., 2402.05109 (Hydra and Hydra++), as a chain.
"""

import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample.drafters import fields
from specsample.drafters import heads
from specsample.drafters import parts
from specsample.drafters import steps
from specsample.models import cache as cache_lib
from specsample.models import decoder_layer
from specsample.models import layers
from specsample.models import masks
from specsample.models import rotary
from specsample.types import Array


class _Head(heads.Head):
  """Head i, which reads the hidden vector and i + 1 token embeddings.

  The first embedding is the pending token's. Only the first layer, which reads
  all of these vectors, differs from Medusa's head.
  """

  def __init__(self, config, i, keys):
    super().__init__(config, config.num_layers - 1)
    dim = config.model.dim
    self.width = sharding.Axis('mlp', dim)
    linear = lambda: parts.linear(
      (i + 2) * dim, dim, keys, (None, self.width), bias=True
    )
    self.read = linear()
    self.around = linear() if config.has_linear_residual else None

  def __call__(self, hidden, embeddings):
    joined = jnp.concatenate([hidden, *embeddings], axis=1)
    x = hidden if self.around is None else self.around(joined)
    x = sharding.constrain(x, 'batch', self.width)
    return self.finish(x + jax.nn.silu(self.read(joined)))


class _PrefixLayer(nnx.Module):
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


class _Network(nnx.Module):
  def __init__(self, config, keys):
    self.heads = nnx.List(
      [_Head(config, i, keys) for i in range(config.num_draft_tokens)]
    )
    self.vocabulary = heads.vocabulary(config)
    self.prefix = (
      _PrefixLayer(config.shape, keys, config.has_prefix_norm)
      if config.prefix_attention
      else None
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hydra(heads.Heads):
  """A drafter whose heads read the pending token and the drafts before theirs.

  Head i draws token i given the pending token and the i drafts before it.

  Hydra++ has four layers per head and `prefix_attention`: a decoder layer like
  the target's own between the target and the heads, over the hidden vectors of
  all tokens before the pending one.

  Embeddings are multiplied by `embedding_scale`, 1 in the paper. If they are
  much smaller than the hidden vectors, heads take long to learn to read them.

  Two options follow the published heads. With `has_linear_residual` the
  residual of a head's first layer is a linear map of its whole input; by
  default it is the hidden vector. With `has_prefix_norm` a norm follows the
  prefix layer.

  `layer_config` is a `models.transformer.Transformer` with the shape of the
  prefix layer, None for the target's. The layer has ordinary keys and values
  and a single feed-forward, even if the shape has latent attention or experts.
  """

  prefix_attention: settings.Flag = False
  embedding_scale: settings.Positive = 1.0
  has_linear_residual: settings.Flag = False
  has_prefix_norm: settings.Flag = False
  layer_config: Any = None
  _network = _Network

  def _check(self):
    super()._check()
    if self.prefix_attention:
      fields.check_shape(self)
    elif self.layer_config is not None or self.has_prefix_norm:
      raise ValueError(
        'layer_config and has_prefix_norm belong to the prefix layer: set '
        'prefix_attention = True, or leave them out'
      )

  @property
  def reads_prompt(self) -> bool:
    return self.prefix_attention

  def vectors(self, params, tokens, hidden, begins=None):
    network = self.merge(params)
    if network.prefix is not None:
      empty = self._prefix_cache(len(tokens), 0, hidden.dtype)
      hidden, _ = network.prefix(hidden, empty, begins)
    embedded = self._embed(params, tokens)
    behind = lambda i: jnp.pad(embedded, ((0, 0), (0, i), (0, 0)))[:, i:]
    rows = lambda x: x.reshape(-1, x.shape[-1])
    embeddings = [rows(behind(i + 1)) for i in range(self.num_draft_tokens)]
    return [
      head(rows(hidden), embeddings[: i + 1]).reshape(hidden.shape)
      for i, head in enumerate(network.heads)
    ]

  def init(self, params, batch_size, max_length):
    state = super().init(params, batch_size, max_length)
    if not self.prefix_attention:
      return state
    cache = self._prefix_cache(batch_size, max_length, state.hidden.dtype)
    return dataclasses.replace(state, cache=cache)

  def _prefix_cache(self, batch_size, max_length, dtype):
    num_heads, size = self.shape.num_kv_heads, self.shape.head_dim
    return cache_lib.init(batch_size, max_length, 1, num_heads, size, dtype)

  def observe(self, params, tokens, count, output, verdict, state):
    if self.prefix_attention:
      fields.check_dtype(output.hidden.dtype, state.hidden.dtype)
      hidden, cache = self.merge(params).prefix(output.hidden, state.cache)
      cache = cache_lib.commit(cache, state.length + count)
      state = dataclasses.replace(state, cache=cache)
      output = dataclasses.replace(output, hidden=hidden)
    return super().observe(params, tokens, count, output, verdict, state)

  def _embed(self, params, ids):
    embedded = self.model.embed(params['target'], ids)
    return embedded * jnp.asarray(self.embedding_scale, embedded.dtype)

  @property
  def num_unrolled(self) -> int:
    """See `steps.Steps`: each head reads one embedding more."""
    return self.num_draft_tokens - 1

  def first(self, params, tokens, length, state):
    carry: Any = state.hidden, []
    return self.next(params, steps.pending(tokens, length), None, carry)

  def next(self, params, tokens, parents, carry):
    """See `steps.Steps`: the carry is the hidden vector, and those of paths."""
    hidden, embeddings = carry
    number = len(embeddings)
    embeddings = steps.of_parents(embeddings, tokens, parents)
    embeddings = [*embeddings, self._embed(params, tokens)]
    shape = embeddings[0].shape
    rows = lambda x: x.reshape(-1, x.shape[-1])
    vectors = self.merge(params).heads[number](
      rows(jnp.broadcast_to(hidden[:, None], shape)), [*map(rows, embeddings)]
    )
    logits = self.head_logits(params, number, vectors.reshape(shape))
    return logits, (hidden, embeddings)
