"""Weights of a round's drafts in the loss, from the drafter's probabilities.

A draft counts in decoding only if all drafts before it are kept. Fixed weights,
such as decay ** i, express this whatever the drafter has learned; the functions
here use the drafter's own probabilities. Their weights have no gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specsample import checks
from specsample.training import compared
from specsample.training import rows as rows_lib
from specsample.types import Array

# weights(log_probs [K, ...], learned [K, ...]) -> [K, ...]: for K consecutive
# drafts, log-probabilities of the text's tokens, and which drafts are learned.
SlotWeights = Callable[[Array, Array], Array]


def d_pace(log_probs: Array, learned: Array, smoothing: float = 0.5) -> Array:
  """Returns the weights of D-PACE (2605.18810).

  With s_i = (1 - smoothing) * prob_i + smoothing, and 1 where nothing is
  learned, the weight of draft i is the sum of s_0 ... s_j over the learned
  j >= i. This is the gradient, with respect to log s_i, of the expected number
  of tokens kept under the smoothed probabilities.

  Args:
    log_probs: [K, ...] of the text's tokens; -inf for those never drafted.
    learned: [K, ...] bool, which drafts count.
    smoothing: from 0 to 1; above 0, drafts after a bad one are learned too.

  Returns:
    [K, ...] float32, without a gradient; 0 after the last learned draft.

  Raises:
    ValueError: the smoothing is out of range.
  """
  checks.share('smoothing', smoothing)
  probs = jnp.exp(jax.lax.stop_gradient(log_probs).astype(jnp.float32))
  smooth = jnp.where(learned, (1 - smoothing) * probs + smoothing, 1)
  reached = jnp.where(learned, jnp.cumprod(smooth, axis=0), 0)
  return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=0), axis=0), axis=0)


def total(
  found: compared.Compared,
  rows: rows_lib.Rows,
  decay: float,
  slot_weights: SlotWeights | None,
) -> Array:
  """Returns the weighted sum [] of the losses of drafts.

  Args:
    found: arrays [K, B, T]; draft i is for the token i + 2 places later.
    rows: the batch's.
    decay: the weight of draft i is decay ** i, if `slot_weights` is None.
    slot_weights: the function that computes the weights instead.
  """
  if slot_weights is None:
    of_drafts = [decay**i * jnp.sum(x) for i, x in enumerate(found.losses)]
    return jnp.sum(jnp.stack(of_drafts))
  learned = [rows.learned(i + 2) for i in range(len(found.losses))]
  weights = slot_weights(found.log_probs, jnp.stack(learned))
  return jnp.sum(weights * found.losses)
