"""Losses of a draft against the target, position by position.

`logits` [..., V] are the drafter's, in any float dtype; everything is computed
in float32. `target_log_probs` [..., V] are the target's log-probabilities of
the same tokens. If the drafter's vocabulary is a part of the target's, their
probabilities sum to less than 1; the rest is a constant of the losses. All
losses return [...], to be averaged by `masked_mean`.

The names follow DistillSpec (Zhou et al., 2310.08461). The gradients of the
most used losses are written out, because JAX's own would pass over the
vocabulary many times; they are with respect to the drafter's logits alone, the
target is a constant.
"""

import math

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample.types import Array

# Below this acceptance rate, the logarithm mostly measures rounding errors.
_SMALLEST_RATE = 1e-5


def cross_entropy(logits: Array, tokens: Array) -> Array:
  """Returns -log of the draft's probability of tokens [...]: hard labels.

  Medusa's heads are trained with it (Cai et al., 2401.10774, equation 1).
  """
  return _cross_entropy(_wide(logits), tokens)


def forward_kl(logits: Array, target_log_probs: Array) -> Array:
  """Returns KL(target || draft), the loss of knowledge distillation.

  (Hinton et al., 1503.02531.) Up to the target's entropy it is the
  cross-entropy against the target's distribution, the teacher loss of Hydra++
  (Ankner et al., 2402.05109).
  """
  return _forward_kl(_wide(logits), _wide(target_log_probs))


def reverse_kl(logits: Array, target_log_probs: Array) -> Array:
  """Returns KL(draft || target), as in MiniLLM (Gu et al., 2306.08543)."""
  return _divergence(_log_softmax(logits), _wide(target_log_probs))


def jsd(logits: Array, target_log_probs: Array, weight: float = 0.5) -> Array:
  """Returns the Jensen-Shannon divergence of GKD (Agarwal et al., 2306.13649).

  It is weight * KL(target || mixture) + (1 - weight) * KL(draft || mixture)
  with mixture = weight * target + (1 - weight) * draft. At a weight of 1/2 it
  lies between 0 and log 2.

  Args:
    logits, target_log_probs: [..., V].
    weight: weight of the target, in (0, 1).

  Raises:
    ValueError: the weight is not in (0, 1).
  """
  if not 0 < weight < 1:
    raise ValueError(f'weight is {weight}: it must be between 0 and 1')
  draft, target = _log_softmax(logits), _wide(target_log_probs)
  mixture = weight * jnp.exp(target) + (1 - weight) * jnp.exp(draft)
  mixture = jnp.log(jnp.where(mixture > 0, mixture, 1))
  # Outside the drafter's vocabulary the mixture is weight * target.
  elsewhere = 1 - jnp.sum(jnp.exp(target), axis=-1)
  here = weight * _divergence(target, mixture)
  here += (1 - weight) * _divergence(draft, mixture)
  return here - weight * math.log(weight) * jnp.maximum(elsewhere, 0)


def total_variation(logits: Array, target_log_probs: Array) -> Array:
  """Returns 1 - sum min(target, draft), the probability of a rejection.

  (Leviathan et al., 2211.17192, corollary 3.6; a loss in DistillSpec.)
  """
  return _total_variation(_wide(logits), _wide(target_log_probs))


def negative_log_acceptance(logits: Array, target_log_probs: Array) -> Array:
  """Returns -log of the acceptance rate sum min(target, draft), "nla".

  The likelihood loss of LK (2602.23881). Its gradient is that of the total
  variation divided by the acceptance rate, so it does not vanish if nearly
  every draft is rejected. At rates below 1e-5 the value is constant, -log 1e-5,
  and the gradient is 0.
  """
  accepted = 1 - total_variation(logits, target_log_probs)
  return -jnp.log(jnp.maximum(accepted, _SMALLEST_RATE))


def hybrid(
  logits: Array, target_log_probs: Array, sharpness: float = 3.0
) -> Array:
  """Returns the hybrid of LK: KL(target || draft) early, total variation late.

  It is w * KL + (1 - w) * TV with w = exp(-sharpness * acceptance rate) at each
  position. No gradient flows through w (2602.23881).

  Args:
    logits, target_log_probs: [..., V].
    sharpness: eta; 0 is KL alone.

  Raises:
    ValueError: the sharpness is negative.
  """
  if not sharpness >= 0:
    raise ValueError(f'sharpness is {sharpness}: give at least 0')
  variation = total_variation(logits, target_log_probs)
  weight = jax.lax.stop_gradient(jnp.exp(-sharpness * (1 - variation)))
  divergence = forward_kl(logits, target_log_probs)
  return weight * divergence + (1 - weight) * variation


def masked_mean(values: Array, mask: Array) -> Array:
  """Averages values [...] where mask [...] is set: []; 0 if it is nowhere."""
  # Selected, not multiplied: masked values may be infinite.
  kept = jnp.where(mask, values, 0)
  return jnp.sum(kept) / jnp.maximum(jnp.sum(mask), 1)


@jax.custom_vjp
def _cross_entropy(logits, tokens):
  return _log_sum_exp(logits)[..., 0] - indexing.pick(logits, tokens)


def _cross_entropy_backward(kept, cotangent):
  logits, tokens = kept
  is_token = jnp.arange(logits.shape[-1]) == tokens[..., None]
  return cotangent[..., None] * (_softmax(logits) - is_token), None


@jax.custom_vjp
def _forward_kl(logits, target):
  probs = jnp.exp(target)
  ratio = target - (logits - _log_sum_exp(logits))
  return jnp.sum(jnp.where(probs > 0, probs * ratio, 0), axis=-1)


def _forward_kl_backward(kept, cotangent):
  logits, target = kept
  probs = jnp.exp(target)
  mass = jnp.sum(probs, axis=-1, keepdims=True)
  return cotangent[..., None] * (mass * _softmax(logits) - probs), None


@jax.custom_vjp
def _total_variation(logits, target):
  draft = logits - _log_sum_exp(logits)
  return 1 - jnp.sum(jnp.exp(jnp.minimum(draft, target)), axis=-1)


def _total_variation_backward(kept, cotangent):
  logits, target = kept
  draft = logits - _log_sum_exp(logits)
  probs = jnp.exp(draft)
  # The acceptance rate grows only with tokens that the draft underestimates.
  below = jnp.where(draft < target, probs, 0)
  mass = jnp.sum(below, axis=-1, keepdims=True)
  return cotangent[..., None] * (mass * probs - below), None


def _keep(function):
  """Makes `function` a `custom_vjp` forward pass that keeps its inputs."""
  return lambda *args: (function(*args), args)


_cross_entropy.defvjp(_keep(_cross_entropy), _cross_entropy_backward)
_forward_kl.defvjp(_keep(_forward_kl), _forward_kl_backward)
_total_variation.defvjp(_keep(_total_variation), _total_variation_backward)


def _divergence(log_probs, other):
  """Sums exp(log_probs) * (log_probs - other) over possible tokens."""
  probs = jnp.exp(log_probs)
  possible = probs > 0
  # Both are masked before the subtraction; otherwise the entries that `where`
  # leaves out would have a gradient of NaN.
  ratio = jnp.where(possible, log_probs, 0) - jnp.where(possible, other, 0)
  return jnp.sum(probs * ratio, axis=-1)


def _log_sum_exp(logits):
  return jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def _softmax(logits):
  return jnp.exp(logits - _log_sum_exp(logits))


def _log_softmax(logits):
  return jax.nn.log_softmax(_wide(logits), axis=-1)


def _wide(x):
  return x.astype(jnp.float32)
