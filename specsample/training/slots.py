"""How much each draft of a round counts in the loss, by how the others do.

A draft counts in decoding only if all before it are kept. Fixed weights, such
as decay ** i, say so whatever the drafter has learned; a function here says it
by the drafter's own probabilities. Its weights have no gradient.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specsample.types import Array

# weights(log_probs [K, ...], learned [K, ...]) -> [K, ...]: of K drafts in a
# row, the log-probabilities of the tokens that came, and which are learned.
SlotWeights = Callable[[Array, Array], Array]


def d_pace(log_probs: Array, learned: Array, smoothing: float = 0.5) -> Array:
  """The weights of D-PACE (2605.18810).

  With s_i = (1 - smoothing) * prob_i + smoothing, and 1 where nothing is
  learned, draft i weighs the sum over the learned j >= i of s_0 ... s_j. It is
  the gradient of the expected number of tokens kept, of these smoothed
  probabilities, by log s_i.

  Args:
    log_probs: [K, ...] of the tokens that came; -inf of those never drafted.
    learned: [K, ...] bool, which of them count.
    smoothing: so that drafts after a bad one are learned too, from 0 to 1.

  Returns:
    [K, ...] float32, without a gradient; 0 after the last that is learned.

  Raises:
    ValueError: the smoothing is out of range.
  """
  if not 0 <= smoothing <= 1:
    raise ValueError(f'smoothing is {smoothing}: give a number from 0 to 1')
  probs = jnp.exp(jax.lax.stop_gradient(log_probs).astype(jnp.float32))
  smooth = jnp.where(learned, (1 - smoothing) * probs + smoothing, 1)
  reached = jnp.where(learned, jnp.cumprod(smooth, axis=0), 0)
  return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=0), axis=0), axis=0)


def total(
  losses: Array,
  fixed: Sequence[float],
  slot_weights: SlotWeights | None,
  log_probs: Array,
  learned: Array,
) -> Array:
  """Returns the sum [] of the losses [K, ...] of K drafts, weighted.

  Args:
    losses: 0 where nothing is learned.
    fixed: K weights, for `slot_weights` None.
    slot_weights: what gives the weights instead.
    log_probs, learned: see `SlotWeights`.
  """
  if slot_weights is None:
    of_drafts = [w * jnp.sum(x) for w, x in zip(fixed, losses, strict=True)]
    return jnp.sum(jnp.stack(of_drafts))
  return jnp.sum(slot_weights(log_probs, learned) * losses)
