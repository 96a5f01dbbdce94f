"""Rotary position embeddings (Su et al., 2104.09864) and their scaling.

The fields of a scaling are called as in config.json.
"""

import dataclasses
import math

import jax.numpy as jnp

from specsample import settings
from specsample.types import Array


@dataclasses.dataclass(frozen=True)
class LinearRope:
  """Positions divided by `factor` (Chen et al., 2306.15595)."""

  factor: float

  def __call__(self, frequencies: Array) -> Array:
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class FactorRope(settings.Settings):
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
  original_max_position_embeddings: int

  def __call__(self, frequencies: Array) -> Array:
    wavelengths = 2 * math.pi / frequencies
    ratio = self.original_max_position_embeddings / wavelengths
    kept = (ratio - self.low_freq_factor) / (
      self.high_freq_factor - self.low_freq_factor
    )
    kept = jnp.clip(kept, 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnRope:
  """YaRN: low frequencies are divided by `factor` (Peng et al., 2309.00071).

  Attributes:
    factor: s in the paper.
    original_max_position_embeddings: the length of the sequences that the model
      was first trained on.
    beta_fast, beta_slow: frequencies that make more than `beta_fast` turns in
      that length are kept, and those that make fewer than `beta_slow` turns are
      divided.
    attention_factor: the factor for the rotated vectors, 0.1 ln(s) + 1 if None.
    truncate: whether the ends of the ramp are rounded to whole numbers.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True

  def __call__(self, frequencies: Array) -> Array:
    """Divides low frequencies, with a ramp over the pairs of dimensions."""
    count = frequencies.shape[0]
    turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
    # The number of turns falls by the same factor from pair to pair.
    step = jnp.log(turns[0] / turns[-1]) / (count - 1)
    place = lambda wanted: jnp.log(turns[0] / wanted) / step
    low, high = place(self.beta_fast), place(self.beta_slow)
    if self.truncate:
      low, high = jnp.floor(low), jnp.ceil(high)
    low, high = jnp.maximum(low, 0), jnp.minimum(high, 2 * count - 1)
    ramp = (jnp.arange(count) - low) / jnp.maximum(high - low, 1e-3)
    divided = jnp.clip(ramp, 0, 1)
    return frequencies * (1 - divided + divided / self.factor)

  @property
  def attention_scale(self) -> float:
    """The factor for the rotated vectors."""
    if self.attention_factor is not None:
      return self.attention_factor
    return 0.1 * math.log(self.factor) + 1


@dataclasses.dataclass(frozen=True)
class ProportionalRope:
  """Only the first pairs of dimensions turn, `share` of them (Gemma 4)."""

  share: float

  def __call__(self, frequencies: Array) -> Array:
    count = frequencies.shape[0]
    turns = jnp.arange(count) < int(self.share * count)
    return jnp.where(turns, frequencies, 0)


Scaling = LinearRope | FactorRope | Llama3Rope | YarnRope | ProportionalRope
# Their names in files.
SCALINGS: dict[str, type[Scaling]] = {
  'linear': LinearRope,
  'factors': FactorRope,
  'llama3': Llama3Rope,
  'yarn': YarnRope,
  'proportional': ProportionalRope,
}


def name_of(scaling: Scaling) -> str:
  """Returns the name of a scaling in files."""
  return next(name for name, x in SCALINGS.items() if type(scaling) is x)


def tables(
  positions: Array,
  head_dim: int,
  theta: float,
  scaling: Scaling | None = None,
) -> tuple[Array, Array]:
  """Returns cosines and sines [..., head_dim / 2] of positions [...]."""
  exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  frequencies = theta**-exponents
  if scaling is not None:
    frequencies = scaling(frequencies)
  angles = positions[..., None].astype(jnp.float32) * frequencies
  scale = scaling.attention_scale if isinstance(scaling, YarnRope) else 1.0
  return scale * jnp.cos(angles), scale * jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates heads x [B, T, H, head_dim] by tables [B, T, head_dim / 2].

  The two halves of a head are rotated against each other (Hugging Face's
  layout, not the interleaved one of the paper). If the tables are of fewer
  dimensions, the others of a head stay as they are.
  """
  size = 2 * cos.shape[-1]
  if size < x.shape[-1]:
    rotated = rotate(x[..., :size], cos, sin)
    return jnp.concatenate([rotated, x[..., size:]], axis=-1)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x.dtype)
