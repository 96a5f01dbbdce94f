"""Attention over a cache: grouped queries, or one latent vector for all heads.

Activations are rows [B * T, D]. The cache is only read: the keys and values of
new tokens are returned.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import settings
from specsample import sharding
from specsample.cpu import native
from specsample.models import int8
from specsample.models import layers
from specsample.models import matrices
from specsample.models import rotary
from specsample.types import Array


class Attention(nnx.Module):
  """Grouped-query attention over a cache (Ainslie et al., 2305.13245).

  `config` has the fields of `transformer.Transformer`. With `is_shared` the
  layer has no keys and values of its own, but reads those of an earlier layer.
  """

  def __init__(self, config, keys, in_dim=None, *, is_shared=False):
    in_dim = config.dim if in_dim is None else in_dim
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    head_dim, dtype = config.head_dim, jnp.dtype(config.dtype)
    self.kv_axis = sharding.Axis('kv_heads', num_kv_heads)
    self.group_axis = sharding.Axis(
      'heads_of_kv', num_heads // num_kv_heads, within=self.kv_axis
    )
    heads = (self.kv_axis, self.group_axis)
    linear = functools.partial(layers.Linear, keys=keys, dtype=dtype)
    read = functools.partial(linear, in_dim, bias=config.attention_bias)
    read_heads = lambda: read(num_heads * head_dim, axes=(None, heads))
    read_kv = lambda: read(num_kv_heads * head_dim, axes=(None, self.kv_axis))
    self.query = read_heads()
    self.gate: Any = read_heads() if config.has_output_gate else None
    self.key = None if is_shared else read_kv()
    has_value = not (is_shared or config.values_are_keys)
    self.value = read_kv() if has_value else None
    self.out = linear(
      num_heads * head_dim,
      config.dim,
      axes=(heads, None),
      bias=config.attention_out_bias,
    )
    norm = lambda: layers.norm_of(config, head_dim) if config.qk_norm else None
    self.query_norm = norm()
    self.key_norm = None if is_shared else norm()
    self.value_eps = config.norm_eps if config.has_value_norm else None
    zeros = jnp.zeros(num_heads, dtype)
    self.sinks = nnx.Param(zeros, axes=(heads,)) if config.has_sinks else None
    self.num_heads = num_heads
    self.num_kv_heads = num_kv_heads
    self.head_dim = head_dim
    self.scale = config.query_scale or 1 / math.sqrt(head_dim)
    self.softcap = config.attention_softcap

  def __call__(self, x, rope, mask, keys, values, attend_with=None):
    """Attends from x [B * T, D] to the cache and among the new tokens.

    `rope` holds the rotary tables, `mask` is [B, T, S + T], and `keys` and
    `values` are a layer's cache leaves. `attend_with` replaces `attend`; the
    leaves and the mask may then have any shape that it supports, but the mask
    begins with [B, T]. A shared layer gets pairs instead of leaves: an earlier
    layer's, and what this has returned; it returns None for its own.

    Returns the layer's output [B * T, D], and the keys and values
    [B, H, T, head_dim] of the new tokens, which are not in the cache yet.
    """
    batch, num_new, _ = mask.shape
    kv, heads_of_kv = self.kv_axis, self.group_axis
    num_kv, head_dim = self.num_kv_heads, self.head_dim
    group = self.num_heads // num_kv
    found = _applied(
      x, query=self.query, key=self.key, value=self.value, gate=self.gate
    )
    query = self._heads(found['query'], batch, (kv, heads_of_kv))
    query = layers.normed(self.query_norm, query)
    query = rotary.rotate(query, *rope) * self.scale
    new_keys: Any = None
    new_values: Any = None
    if self.key is not None:
      new_keys, new_values = self._keys_and_values(found, rope, batch)
      new_keys = int8.stored_as(new_keys, keys)
      new_values = int8.stored_as(new_values, values)
      keys, values = (keys, new_keys), (values, new_values)

    # The queries of a group are rows of one product with their head's keys.
    axes: tuple[sharding.Axes, ...] = 'batch', None, kv, heads_of_kv, None
    shape: tuple[int, ...] = batch, num_new, num_kv, group, head_dim
    query = sharding.reshape(query, shape, *axes).transpose(0, 2, 3, 1, 4)
    shape = batch, num_kv, group * num_new, head_dim
    axes = 'batch', kv, heads_of_kv, None
    query = sharding.reshape(query, shape, *axes)
    sinks = self._sinks_of_queries(num_new)
    mixed = (attend_with or attend)(
      query, mask, keys, values, softcap=self.softcap, sinks=sinks
    ).astype(x.dtype)
    shape = batch, num_kv, group, num_new, head_dim
    mixed = sharding.reshape(mixed, shape, *axes, None)
    mixed = mixed.transpose(0, 3, 1, 2, 4)
    shape = batch * num_new, self.num_heads * head_dim
    mixed = sharding.reshape(mixed, shape, 'batch', (kv, heads_of_kv))
    if self.gate is not None:
      mixed *= jax.nn.sigmoid(found['gate'])
    return self.out(mixed), new_keys, new_values

  def keys_and_values(
    self, x: Array, rope: tuple[Array, Array], batch: int
  ) -> tuple[Array, Array]:
    """Returns the keys and values of x [B * T, D]: [B, H, T, head_dim] each."""
    found = _applied(x, key=self.key, value=self.value)
    return self._keys_and_values(found, rope, batch)

  def _keys_and_values(self, found, rope, batch):
    keys = values = self._heads(found['key'], batch, self.kv_axis)
    keys = rotary.rotate(layers.normed(self.key_norm, keys), *rope)
    if self.value is not None:
      values = self._heads(found['value'], batch, self.kv_axis)
    if self.value_eps is not None:
      values = layers.rms_normed(values, self.value_eps).astype(keys.dtype)
    return jnp.swapaxes(keys, 1, 2), layers.finite(jnp.swapaxes(values, 1, 2))

  def _sinks_of_queries(self, num_new):
    """Returns the sinks [H, G * T] of the queries that `attend` gets."""
    if self.sinks is None:
      return None
    shape = self.num_kv_heads, self.num_heads // self.num_kv_heads
    axes = self.kv_axis, self.group_axis
    sinks = sharding.reshape(self.sinks[...], shape, *axes)
    sinks = jnp.broadcast_to(sinks[..., None], (*shape, num_new))
    return sharding.reshape(sinks, (shape[0], shape[1] * num_new), *axes)

  def _heads(self, y, batch, axis):
    num_new = y.shape[0] // batch
    shape = (batch, num_new, y.shape[1] // self.head_dim, self.head_dim)
    return sharding.reshape(y, shape, 'batch', None, axis, None)


def _applied(x, **linears):
  """Returns the results of those linear maps that a layer has, by name."""
  given = {name: linear for name, linear in linears.items() if linear}
  results = layers.apply_linears(x, list(given.values()))
  return dict(zip(given, results, strict=True))


def attend(
  query: Array,
  mask: Array,
  keys: tuple,
  values: tuple,
  softcap: float | None = None,
  sinks: Array | None = None,
) -> Array:
  """Attends from queries [B, H, G * T, D] to a cache and to the new tokens.

  Args:
    query: already scaled; the T queries of one head of a group follow those of
      another.
    mask: [B, T, S + T].
    keys, values: pairs of the cache's [B, H, S, D] and the new tokens'
      [B, H, T, D]. If queries see only the cache, the new ones are
      [B, H, 0, D] and the mask is [B, T, S].
    softcap: if given, scores are c * tanh(score / c) (Gemma 2, 2408.00118).
    sinks: [H, G * T], a score per query of an entry whose value is 0, which
      every query sees (gpt-oss, 2508.10925).

  Returns:
    [B, H, G * T, D] float32; zeros for a query that sees nothing.
  """
  plain = lambda query, mask, keys, values, sinks: _attend(
    query, mask, keys, values, softcap, sinks
  )
  is_float32 = all(
    isinstance(x, jax.Array) and x.dtype == jnp.float32
    for x in (query, *keys, *values)
  )
  if not (is_float32 and native.is_used()):
    return plain(query, mask, keys, values, sinks)
  if sinks is None:
    sinks = jnp.full((query.shape[1], query.shape[2]), _NEVER, jnp.float32)
  fast = functools.partial(native.attention, softcap=softcap or 0.0)
  sinks = sinks.astype(jnp.float32)
  return native.on_cpu(fast, plain)(query, mask, keys, values, sinks)


# The score of an entry that is not seen.
_NEVER = -1e30


def _attend(query, mask, keys, values, softcap, sinks):
  num_queries, size = query.shape[2], mask.shape[2] - keys[1].shape[2]
  if num_queries == 1:
    # For a single row the TPU compiler does not emit a matrix product, and what
    # it emits instead needs the whole cache in another layout.
    query = jnp.repeat(query, 2, axis=2)
  mask = jnp.tile(mask, (1, num_queries // mask.shape[1], 1))[:, None]
  score = lambda part, seen: jnp.where(
    seen, capped(int8.scores(query, part), softcap), _NEVER
  )
  cached = score(keys[0], mask[..., :size])
  new = score(keys[1], mask[..., size:])
  # Above the scores of what is not seen, so that all their weights are 0, also
  # of a query that sees nothing.
  top = lambda x: jnp.max(x, axis=-1, keepdims=True, initial=_NEVER / 2)
  highest = jax.lax.stop_gradient(jnp.maximum(top(cached), top(new)))
  if sinks is not None:
    sinks = sinks.astype(jnp.float32)[None, :, :, None]
    highest = jnp.maximum(highest, jax.lax.stop_gradient(sinks))
  # Divided by their sum at the end, the weights need not be copied into one
  # array and out of it again.
  cached, new = jnp.exp(cached - highest), jnp.exp(new - highest)
  total = jnp.sum(cached, axis=-1, keepdims=True)
  total += jnp.sum(new, axis=-1, keepdims=True)
  if sinks is not None:
    total += jnp.exp(sinks - highest)
  mixed = int8.mix(cached, values[0], query.dtype)
  mixed += int8.mix(new, values[1], query.dtype)
  mixed /= jnp.where(total > 0, total, 1)
  return mixed[:, :, :num_queries]


def capped(scores: Array, softcap: float | None) -> Array:
  """Returns c * tanh(scores / c), or the scores if c is None."""
  return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent(settings.Settings):
  """Sizes of attention over latent vectors (DeepSeek-V2, 2405.04434).

  Attributes:
    kv_rank: size of the vector that keys and values are made of.
    rope_dim: size of the rotated part of queries and keys; all heads share the
      key's.
    head_dim: size of the part that is not rotated.
    value_dim: size of a head's values.
    query_rank: size of the vector that queries are made of; None if they are
      made of the input itself.
  """

  kv_rank: settings.Count
  rope_dim: settings.Count
  head_dim: settings.Count
  value_dim: settings.Count
  query_rank: settings.Count | None = None


# Fixed: a model's own epsilon applies only to the norms of layers.
_LATENT_EPS = 1e-6


class LatentAttention(nnx.Module):
  """Attention whose cache holds one latent vector per token, for all heads.

  Keys and values are never expanded: the products that would make them are
  absorbed into the query's and the output's. All heads are then queries of a
  single head, whose keys are [latent vector; rotated part] (2405.04434,
  section 2.1).
  """

  def __init__(self, config, keys):
    sizes, dtype = config.latent, jnp.dtype(config.dtype)
    self.heads = sharding.Axis('kv_heads', config.num_heads)
    linear = functools.partial(layers.Linear, keys=keys, dtype=dtype)
    norm = lambda dim: layers.RMSNorm(dim, _LATENT_EPS, dtype)
    rank = sizes.query_rank
    self.query_in: Any = rank and linear(config.dim, rank, axes=(None, None))
    self.query_norm: Any = rank and norm(rank)
    in_dim = rank or config.dim
    width = config.num_heads * (sizes.head_dim + sizes.rope_dim)
    self.query = linear(in_dim, width, axes=(None, self.heads))
    shared = sizes.kv_rank + sizes.rope_dim
    self.key_value_in = linear(config.dim, shared, axes=(None, None))
    self.key_value_norm = norm(sizes.kv_rank)
    width = config.num_heads * (sizes.head_dim + sizes.value_dim)
    self.key_value = linear(sizes.kv_rank, width, axes=(None, self.heads))
    width = config.num_heads * sizes.value_dim
    self.out = linear(width, config.dim, axes=(self.heads, None))
    self.num_heads = config.num_heads
    self.sizes = sizes
    self.scale = config.query_scale or 1 / math.sqrt(
      sizes.head_dim + sizes.rope_dim
    )

  def __call__(self, x, rope, mask, keys, values, attend_with=None):
    """Attends as `Attention` does; `values` is None.

    `keys` are [B, 1, S, kv_rank + rope_dim].
    """
    batch, num_new, _ = mask.shape
    sizes, num_heads, heads = self.sizes, self.num_heads, self.heads
    read = x
    if self.query_in is not None:
      read = self.query_norm(self.query_in(x))
    axes: tuple[sharding.Axes, ...] = 'batch', None, heads, None
    width = sizes.head_dim + sizes.rope_dim
    shape: tuple[int, ...] = batch, num_new, num_heads, width
    query = sharding.reshape(self.query(read), shape, *axes)
    plain, rotated = jnp.split(query, [sizes.head_dim], axis=-1)
    rotated = rotary.rotate(rotated, *rope)
    kernel = matrices.dense(self.key_value.kernel.get_value(), x.dtype)
    shape = sizes.kv_rank, num_heads, sizes.head_dim + sizes.value_dim
    kernel = sharding.reshape(kernel, shape, None, heads, None)
    of_keys, of_values = jnp.split(kernel, [sizes.head_dim], axis=-1)
    plain = jnp.einsum('bthd,rhd->bhtr', plain, of_keys)
    query = jnp.concatenate([plain, jnp.swapaxes(rotated, 1, 2)], axis=-1)
    shape = batch, 1, num_heads * num_new, query.shape[-1]
    query = sharding.reshape(query * self.scale, shape, *axes)

    made = self.key_value_in(x).reshape(batch, num_new, 1, -1)
    latent, rotated = jnp.split(made, [sizes.kv_rank], axis=-1)
    latent = layers.finite(self.key_value_norm(latent))
    rotated = rotary.rotate(rotated, *rope)
    new = jnp.swapaxes(jnp.concatenate([latent, rotated], axis=-1), 1, 2)
    new_keys = int8.stored_as(new, keys)
    as_values = lambda entries: jax.tree.map(
      lambda leaf: leaf[..., : sizes.kv_rank], entries
    )
    values = as_values(keys), as_values(new_keys)
    attended = (attend_with or attend)(query, mask, (keys, new_keys), values)
    shape = batch, num_heads, num_new, sizes.kv_rank
    axes = 'batch', heads, None, None
    mixed = sharding.reshape(attended.astype(x.dtype), shape, *axes)
    mixed = jnp.einsum('bhtr,rhd->bthd', mixed, of_values)
    shape = batch * num_new, num_heads * sizes.value_dim
    mixed = sharding.reshape(mixed, shape, 'batch', heads)
    return self.out(mixed), new_keys, None
