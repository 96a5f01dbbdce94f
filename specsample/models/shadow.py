"""An int8 table beside the unembedding, which bounds every logit.

With w a token's vector, q times a scale its rounded one and h a hidden vector,
Cauchy and Schwarz give

  |w h - scale (q h)| <= |w - scale q| |h|,

so a product that reads one byte per weight tells how large each logit can be.
Floating-point rounding is bounded too (Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1), for any order of the sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.models import int8
from specsample.models import matrices
from specsample.types import Array

# The largest relative error of one rounding in float32.
_UNIT = 2.0**-24
# Accelerators round the factors of float32 products: TPUs to bfloat16.
_UNIT_OF_FACTORS = 2.0**-9
# Entries by which a table is told from that of other weights.
_NUM_PROBES = 64


@types.pytree
class Shadow:
  """The rounded unembedding, and how far each token's vector is from it."""

  table: int8.Int8  # [D, V], a scale for each token
  error: Array  # [V] float32, at least |w - scale q|
  norm: Array  # [V] float32, at least |w|
  probes: Array  # [64] float32, entries of the exact matrix


def of_matrix(kernel: matrices.Matrix, vocab: sharding.Axis) -> Shadow:
  """Returns the shadow of an unembedding [D, V], divided along `vocab`."""
  if isinstance(kernel, int8.Int8):
    raise ValueError(
      'the unembedding is stored as int8, so a shadow would save '
      'nothing: load the target with weights=None'
    )
  return _of_matrix(kernel, vocab)


@jax.jit(static_argnames='vocab')
def _of_matrix(kernel, vocab):
  exact = sharding.constrain(matrices.dense(kernel, jnp.float32), None, vocab)
  table = int8.quantise(exact, axis=0)
  # A sum of D squares has at most D roundings, a difference has one, relative
  # to the exact value.
  wider = 1 + _of_sum(len(exact))
  norm = jnp.sqrt(jnp.sum(exact**2, axis=0)) * wider
  left = exact - table.values * table.scale
  error = jnp.sqrt(jnp.sum(left**2, axis=0)) * wider + 2 * _UNIT * norm
  return Shadow(table=table, error=error, norm=norm, probes=_probes(exact))


def axes(vocab: sharding.Axis) -> Shadow:
  """Returns the `sharding.Axes` of a shadow's arrays."""
  of_token: Any = (vocab,)
  return Shadow(
    table=int8.of_kernel(None, vocab),
    error=of_token,
    norm=of_token,
    probes=(None,),  # type: ignore[arg-type]
  )


def is_of(shadow: Shadow, kernel: matrices.Matrix) -> bool:
  """Returns whether a shadow was made from this matrix, by some entries."""
  found = _probes_of(kernel)
  return np.array_equal(np.asarray(found), np.asarray(shadow.probes))


@jax.jit
def _probes_of(kernel):
  return _probes(matrices.dense(kernel, jnp.float32))


def _probes(exact):
  num_in, num_out = exact.shape
  number = np.arange(_NUM_PROBES)
  # Strides without common factors, so that rows and columns both vary.
  of_rows = jnp.take(exact, number * 101 % num_in, axis=0)
  return indexing.pick(of_rows, number * (num_out // 67 + 1) % num_out)


def bounds(
  shadow: Shadow, rows: Array, vocab: sharding.Axis
) -> tuple[Array, Array]:
  """Bounds the logits of hidden vectors.

  Args:
    shadow: of the unembedding.
    rows: [R, D], in the dtype of the computation.
    vocab: the axis of the vocabulary.

  Returns:
    upper: [R, V] float32; no logit that the full product computes is larger.
    rounding: [R, V] float32; how far a logit may be from its exact value if it
      is computed in this dtype.
  """
  middle = int8.product(rows, shadow.table, ('batch', vocab), jnp.float32)
  wide = rows.astype(jnp.float32)
  length = jnp.sqrt(jnp.sum(wide**2, axis=-1, keepdims=True))
  length *= 1 + _of_sum(rows.shape[1])
  relative = _relative_rounding(rows)
  # `middle` is rounded as a logit is, and then scaled.
  radius = shadow.error + (2 * relative + 4 * _UNIT) * (
    shadow.norm + shadow.error
  )
  rounding = relative * shadow.norm * length
  return middle + radius * length, rounding


def _of_sum(num_terms):
  """Bounds the relative rounding of a sum of products, in any order."""
  return 1.01 * (num_terms + 2) * _UNIT


def _relative_rounding(rows):
  """Bounds |computed - exact| / (|w| |h|) for a product of D terms."""
  sums = _of_sum(rows.shape[1])
  if rows.dtype != jnp.float32:
    return jnp.float32(sums)  # products of two bfloat16 are exact in float32
  return jax.lax.platform_dependent(
    cpu=lambda: jnp.float32(sums),
    default=lambda: jnp.float32(sums + 2.5 * _UNIT_OF_FACTORS),
  )
