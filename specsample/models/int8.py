"""Vectors of 8-bit integers with a scale each."""

import jax.numpy as jnp

from specsample import types
from specsample.types import Array


@types.pytree
class Int8:
  """x [..., D], each vector as integers times a scale."""

  values: Array  # [..., D] int8
  scale: Array  # [..., 1] float32


def quantise(x: Array) -> Int8:
  """The nearest that integers of -127 to 127 times a scale are to x [..., D].

  No value is off by more than half a scale, the vector's largest / 254.
  """
  wide = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127
  values = jnp.round(wide / jnp.where(scale, scale, 1))
  return Int8(values=values.astype(jnp.int8), scale=scale)


def stored_as(x: Array, entries: Array | Int8) -> Array | Int8:
  """x [..., D] as it will be found among entries of a cache."""
  return quantise(x) if isinstance(entries, Int8) else x


def scores(query: Array, keys: Array | Int8) -> Array:
  """Products [B, H, Q, S] of queries [B, H, Q, D] and keys [B, H, S, D]."""
  if isinstance(keys, Int8):
    of_values = scores(query, keys.values.astype(query.dtype))
    return of_values * jnp.swapaxes(keys.scale, -1, -2)
  return jnp.einsum(
    'bkqh,bksh->bkqs', query, keys, preferred_element_type=jnp.float32
  )


def mix(weights: Array, values: Array | Int8, dtype: jnp.dtype) -> Array:
  """Sums [B, H, Q, D] of values [B, H, S, D] by weights [B, H, Q, S], float32.

  The products are of `dtype`.
  """
  if isinstance(values, Int8):
    weights = weights * jnp.swapaxes(values.scale, -1, -2)
    values = values.values
  return jnp.einsum(
    'bkqs,bksh->bkqh',
    weights.astype(dtype),
    values.astype(dtype),
    preferred_element_type=jnp.float32,
  )
