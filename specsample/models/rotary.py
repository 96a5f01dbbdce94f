"""Rotary positions (Su et al., 2104.09864) and how they are stretched."""

import dataclasses
import math

import jax.numpy as jnp

from specsample.types import Array


@dataclasses.dataclass(frozen=True)
class LinearRope:
  """Positions divided by `factor` (Chen et al., 2306.15595)."""

  factor: float

  def __call__(self, frequencies: Array) -> Array:
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class FactorRope:
  """Each frequency divided by its own factor, as GGUF files store scaling."""

  factors: tuple[float, ...]  # head_dim / 2

  def __call__(self, frequencies: Array) -> Array:
    return frequencies / jnp.asarray(self.factors)


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama 3.1's scaling: low frequencies divided, high ones kept."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_length: int

  def __call__(self, frequencies: Array) -> Array:
    wavelengths = 2 * math.pi / frequencies
    ratio = self.original_max_length / wavelengths
    kept = (ratio - self.low_freq_factor) / (
      self.high_freq_factor - self.low_freq_factor
    )
    kept = jnp.clip(kept, 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / self.factor


def tables(
  positions: Array, head_dim: int, theta: float, scaling=None
) -> tuple[Array, Array]:
  """Cosines and sines [..., head_dim / 2] of positions [...]."""
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  if scaling is not None:
    frequencies = scaling(frequencies)
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates heads x [B, T, H, head_dim] by tables [B, T, head_dim / 2].

  The two halves of a head are rotated against each other (Hugging Face's
  layout, not the interleaved one of the paper).
  """
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)
