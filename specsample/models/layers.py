"""Building blocks of decoder-only transformers, as thin Flax NNX modules.

Modules hold parameters and read them; caches are passed in and returned.
Weights are [in, out] or one of the forms in `matrices`. Activations are rows
[B * T, D], because a batch-1 product with a leading batch axis takes a slow
path on the CPU backend.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.cpu import native
from specsample.models import matrices
from specsample.types import Array


def random_keys(key: Array) -> Iterator[Array]:
  """Yields a key for each weight in turn.

  `nnx.Rngs` counts in an array, and takes seconds to trace for 80 layers.
  """
  for count in itertools.count():
    yield jax.random.fold_in(key, count)


class Linear(nnx.Module):
  """x @ kernel (+ bias), in the dtype of x.

  `axes` are the `sharding.Axes` of the input and the output. Without `keys`
  the kernel is initialised to 0. An int8 kernel may take its place.
  """

  def __init__(self, in_dim, out_dim, *, axes, bias=False, keys, dtype):
    shape = in_dim, out_dim
    if keys is None:
      kernel = jnp.zeros(shape, dtype)
    else:
      normal = jax.random.normal(next(keys), shape, jnp.float32)
      kernel = (1 / math.sqrt(in_dim) * normal).astype(dtype)
    self.kernel = nnx.Param(kernel, axes=axes)
    zeros = lambda: nnx.Param(jnp.zeros(out_dim, dtype), axes=axes[1:])
    self.bias = zeros() if bias else None
    self.out_axis = axes[1]

  def __call__(self, x: Array) -> Array:
    return apply_linears(x, [self])[0]


def apply_linears(x: Array, linears: Sequence[Linear]) -> list[Array]:
  """Applies linear maps to the same rows, in one call where there is one."""
  found = matrices.products(
    x,
    [linear.kernel.get_value() for linear in linears],
    [('batch', linear.out_axis) for linear in linears],
    x.dtype,
  )
  return [
    y if linear.bias is None else y + linear.bias[...]
    for y, linear in zip(found, linears, strict=True)
  ]


def rms_normed(x: Array, eps: float) -> Array:
  """Returns x [..., n] in float32, divided by its root mean square."""
  plain = functools.partial(_rms_normed, eps=eps)
  if x.dtype != jnp.float32 or not native.is_used():
    return plain(x)
  return native.on_cpu(functools.partial(native.norm, eps=eps), plain)(x)


def _rms_normed(x, eps):
  wide = x.astype(jnp.float32)
  variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  return wide * jax.lax.rsqrt(variance + eps)


class RMSNorm(nnx.Module):
  """Root-mean-square normalisation over the last axis, computed in float32.

  The normalised values are multiplied by `offset` + the parameter: in float32
  if `is_wide` or if there is an offset, else in the dtype of the input.
  """

  def __init__(self, dim, eps, dtype, offset=0.0, is_wide=False):
    begin = jnp.full(dim, 1 - offset, dtype)
    self.scale = nnx.Param(begin, axes=(None,))
    self.eps = eps
    self.offset = offset
    self.is_wide = is_wide or offset != 0

  def __call__(self, x: Array) -> Array:
    normed = rms_normed(x, self.eps)
    if self.is_wide:
      scale = self.offset + self.scale[...].astype(jnp.float32)
      return (normed * scale).astype(x.dtype)
    return normed.astype(x.dtype) * self.scale[...]


def norm_of(config: Any, dim: int) -> RMSNorm:
  """Returns a norm of vectors [..., dim].

  `config` has the fields of `transformer.Transformer`.
  """
  eps, dtype = config.norm_eps, jnp.dtype(config.dtype)
  offset, is_wide = config.norm_offset, config.has_wide_norms
  return RMSNorm(dim, eps, dtype, offset, is_wide)


def normed(norm: Any, x: Array) -> Array:
  """Applies a norm to x, if there is one."""
  return x if norm is None else norm(x)


def finite(x: Array) -> Array:
  """Replaces NaN and infinity by zeros, because 0 times either is NaN.

  Otherwise a rejected draft token with such values would affect tokens that do
  not read it. A token that reads it still gets NaN: from its keys in attention,
  and for itself from the layer's input.
  """
  return jnp.where(jnp.isfinite(x), x, 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
  """Gated feed-forward, SwiGLU or GeGLU (Shazeer, 2002.05202).

  `config` has the fields of `transformer.Transformer`; `hidden_dim` overrides
  its `mlp_dim`.
  """

  def __init__(self, config, keys, hidden_dim=None):
    dim, hidden_dim = config.dim, hidden_dim or config.mlp_dim
    width = sharding.Axis('mlp', hidden_dim)
    linear = functools.partial(Linear, keys=keys, dtype=jnp.dtype(config.dtype))
    self.gate = linear(dim, hidden_dim, axes=(None, width))
    self.up = linear(dim, hidden_dim, axes=(None, width))
    self.down = linear(hidden_dim, dim, axes=(width, None))
    self.activation = config.activation

  def __call__(self, x: Array) -> Array:
    activation = ACTIVATIONS[self.activation]
    gate, up = apply_linears(x, [self.gate, self.up])
    return self.down(activation(gate) * up)
