"""Building blocks of decoder-only transformers, as thin Flax NNX modules.

Modules hold parameters and read them; caches come in and go out as values.
Weights are [in, out], activations rows [B * T, D]: a batch-1 product with a
leading batch axis takes a slow path on the CPU backend.
"""

from collections.abc import Iterator
import functools
import itertools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.models import rotary
from specsample.types import Array


def random_keys(key: Array) -> Iterator[Array]:
  """A key for each weight in turn.

  (`nnx.Rngs` counts in an array, and takes seconds to trace for 80 layers.)
  """
  for count in itertools.count():
    yield jax.random.fold_in(key, count)


def _weight(shape, axes, keys, dtype) -> nnx.Param:
  if keys is None:
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)
  scale = 1 / math.sqrt(shape[0])
  value = scale * jax.random.normal(next(keys), shape, jnp.float32)
  return nnx.Param(value.astype(dtype), axes=axes)


class Linear(nnx.Module):
  """x @ kernel (+ bias), in the dtype of both.

  `axes` are the `sharding.Axes` of the input and the output. Without `keys`
  the kernel is 0.
  """

  def __init__(self, in_dim, out_dim, *, axes, bias=False, keys, dtype):
    self.kernel = _weight((in_dim, out_dim), axes, keys, dtype)
    zeros = lambda: nnx.Param(jnp.zeros(out_dim, dtype), axes=axes[1:])
    self.bias = zeros() if bias else None
    self.out_axis = axes[1]

  def __call__(self, x: Array) -> Array:
    y = sharding.einsum(
      'rd,df->rf', x, self.kernel[...], axes=('batch', self.out_axis)
    )
    return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
  """Root-mean-square normalisation, computed in float32."""

  def __init__(self, dim, eps, dtype):
    self.scale = nnx.Param(jnp.ones(dim, dtype), axes=(None,))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + self.eps)
    return normed.astype(x.dtype) * self.scale[...]


class GatedMLP(nnx.Module):
  """SwiGLU feed-forward (Shazeer, 2002.05202)."""

  def __init__(self, dim, hidden_dim, *, keys, dtype):
    width = sharding.Axis('mlp', hidden_dim)
    linear = functools.partial(Linear, keys=keys, dtype=dtype)
    self.gate = linear(dim, hidden_dim, axes=(None, width))
    self.up = linear(dim, hidden_dim, axes=(None, width))
    self.down = linear(hidden_dim, dim, axes=(width, None))

  def __call__(self, x: Array) -> Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Attention(nnx.Module):
  """Grouped-query attention over a cache (Ainslie et al., 2305.13245)."""

  def __init__(
    self,
    dim,
    num_heads,
    num_kv_heads,
    head_dim,
    *,
    in_dim=None,  # of what it reads, if it is not `dim`
    bias=False,
    keys,
    dtype,
  ):
    in_dim = dim if in_dim is None else in_dim
    self.kv_axis = sharding.Axis('kv_heads', num_kv_heads)
    self.group_axis = sharding.Axis(
      'heads_of_kv', num_heads // num_kv_heads, within=self.kv_axis
    )
    heads = [self.kv_axis, self.group_axis]
    linear = functools.partial(Linear, bias=bias, keys=keys, dtype=dtype)
    self.query = linear(in_dim, num_heads * head_dim, axes=(None, heads))
    kv_dim = num_kv_heads * head_dim
    self.key = linear(in_dim, kv_dim, axes=(None, self.kv_axis))
    self.value = linear(in_dim, kv_dim, axes=(None, self.kv_axis))
    self.out = linear(num_heads * head_dim, dim, axes=(heads, None))
    self.num_heads = num_heads
    self.num_kv_heads = num_kv_heads
    self.head_dim = head_dim

  def __call__(self, x, rope, mask, keys, values):
    """x [B * T, D], rope tables, mask [B, T, S + T], one layer's cache leaves.

    Returns the layer's output [B * T, D], and the keys and values
    [B, H, T, head_dim] of the new tokens, which are not in the cache yet.
    """
    batch, num_new, _ = mask.shape
    size = keys.shape[2]
    num_kv_heads, head_dim = self.num_kv_heads, self.head_dim
    kv, heads_of_kv = self.kv_axis, self.group_axis
    group = self.num_heads // num_kv_heads
    heads = lambda y, axis: sharding.reshape(
      y, (batch, num_new, -1, head_dim), 'batch', None, axis, None
    )
    query = heads(self.query(x), [kv, heads_of_kv])
    query = rotary.rotate(query, *rope) / math.sqrt(head_dim)
    new_keys = jnp.swapaxes(rotary.rotate(heads(self.key(x), kv), *rope), 1, 2)
    new_values = jnp.swapaxes(heads(self.value(x), kv), 1, 2)

    # The queries of a group are rows of one product with their head's keys.
    query = sharding.reshape(
      query,
      (batch, num_new, num_kv_heads, group, head_dim),
      *('batch', None, kv, heads_of_kv, None),
    )
    query = sharding.reshape(
      query.transpose(0, 2, 3, 1, 4),
      (batch, num_kv_heads, group * num_new, head_dim),
      *('batch', kv, heads_of_kv, None),
    )
    if query.shape[2] == 1:
      # Of a single row the TPU compiler makes no matrix product, and lays the
      # whole cache out anew for what it makes instead.
      query = jnp.repeat(query, 2, axis=2)
    score = lambda k: jnp.einsum(
      'bkqh,bksh->bkqs', query, k, preferred_element_type=jnp.float32
    )
    scores = jnp.concatenate([score(keys), score(new_keys)], axis=-1)
    mask = jnp.tile(mask, (1, group, 1))[:, None]
    scores = jnp.where(mask, scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mix = lambda w, v: jnp.einsum(
      'bkqs,bksh->bkqh', w, v, preferred_element_type=jnp.float32
    )
    mixed = mix(weights[..., :size], values)
    mixed += mix(weights[..., size:], new_values)
    mixed = mixed[:, :, : group * num_new]

    mixed = sharding.reshape(
      mixed.astype(x.dtype),
      (batch, num_kv_heads, group, num_new, head_dim),
      *('batch', kv, heads_of_kv, None, None),
    )
    mixed = sharding.reshape(
      mixed.transpose(0, 3, 1, 2, 4),
      (batch * num_new, num_kv_heads * group * head_dim),
      *('batch', [kv, heads_of_kv]),
    )
    return self.out(mixed), new_keys, new_values


class DecoderLayer(nnx.Module):
  """Attention and feed-forward behind norms, each added to its input.

  `config` has the fields of `transformer.Transformer`.
  """

  def __init__(self, config, keys):
    dtype = jnp.dtype(config.dtype)
    self.attention_norm = RMSNorm(config.dim, config.norm_eps, dtype)
    self.attention = Attention(
      config.dim,
      config.num_heads,
      config.num_kv_heads,
      config.head_dim,
      bias=config.attention_bias,
      keys=keys,
      dtype=dtype,
    )
    self.mlp_norm = RMSNorm(config.dim, config.norm_eps, dtype)
    self.mlp = GatedMLP(config.dim, config.mlp_dim, keys=keys, dtype=dtype)

  def __call__(self, x, rope, mask, keys, values):
    """As `Attention`, on the rows x [B * T, D] of the layer before."""
    attended, new_keys, new_values = self.attention(
      self.attention_norm(x), rope, mask, keys, values
    )
    x = x + attended
    return x + self.mlp(self.mlp_norm(x)), new_keys, new_values
