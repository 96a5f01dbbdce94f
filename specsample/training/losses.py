"""How far a draft is from the target, position by position.

`logits` [..., V] are the drafter's, any float dtype; everything is computed in
float32. `target_log_probs` [..., V] are the target's log-probabilities of the
same tokens. Where the drafter's vocabulary is a part of the target's they sum
to less than 1: what the target does elsewhere is a constant of the losses. All
return [...], to be averaged by `masked_mean`.

Named as in DistillSpec (Zhou et al., 2310.08461).
"""

import math

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample.types import Array


def cross_entropy(logits: Array, tokens: Array) -> Array:
  """-log of the draft's probability of tokens [...]: hard labels.

  What Medusa's heads are trained on (Cai et al., 2401.10774, equation 1).
  """
  return -indexing.pick(_log_softmax(logits), tokens)


def forward_kl(logits: Array, target_log_probs: Array) -> Array:
  """KL(target || draft): knowledge distillation (Hinton et al., 1503.02531).

  Up to the target's entropy it is the cross-entropy against the target's
  distribution, the teacher loss of Hydra++ (Ankner et al., 2402.05109).
  """
  return _divergence(_wide(target_log_probs), _log_softmax(logits))


def reverse_kl(logits: Array, target_log_probs: Array) -> Array:
  """KL(draft || target), as in MiniLLM (Gu et al., 2306.08543)."""
  return _divergence(_log_softmax(logits), _wide(target_log_probs))


def jsd(logits: Array, target_log_probs: Array, weight: float = 0.5) -> Array:
  """The Jensen-Shannon divergence, as in GKD (Agarwal et al., 2306.13649).

  weight * KL(target || mixture) + (1 - weight) * KL(draft || mixture), with the
  mixture weight * target + (1 - weight) * draft; from 0 to log 2 at 1/2.

  Args:
    logits, target_log_probs: [..., V].
    weight: of the target, in (0, 1).

  Raises:
    ValueError: the weight is not.
  """
  if not 0 < weight < 1:
    raise ValueError(f'weight is {weight}: it must be between 0 and 1')
  draft, target = _log_softmax(logits), _wide(target_log_probs)
  mixture = weight * jnp.exp(target) + (1 - weight) * jnp.exp(draft)
  mixture = jnp.log(jnp.where(mixture > 0, mixture, 1))
  # Elsewhere the mixture is weight * target.
  elsewhere = 1 - jnp.sum(jnp.exp(target), axis=-1)
  here = weight * _divergence(target, mixture)
  here += (1 - weight) * _divergence(draft, mixture)
  return here - weight * math.log(weight) * jnp.maximum(elsewhere, 0)


def total_variation(logits: Array, target_log_probs: Array) -> Array:
  """1 - sum min(target, draft): the probability that a draft is rejected.

  (Leviathan et al., 2211.17192, corollary 3.6; a loss in DistillSpec.)
  """
  draft, target = _log_softmax(logits), _wide(target_log_probs)
  return 1 - jnp.sum(jnp.exp(jnp.minimum(draft, target)), axis=-1)


def masked_mean(values: Array, mask: Array) -> Array:
  """The mean [] of values [...] where mask [...] is set; 0 where it is not."""
  # Selected, not multiplied: what is masked out may be infinite.
  kept = jnp.where(mask, values, 0)
  return jnp.sum(kept) / jnp.maximum(jnp.sum(mask), 1)


def _divergence(log_probs, other):
  """sum exp(log_probs) (log_probs - other), without tokens of probability 0."""
  probs = jnp.exp(log_probs)
  possible = probs > 0
  # Both are replaced before they are subtracted: the gradient of what `where`
  # leaves out would be NaN.
  ratio = jnp.where(possible, log_probs, 0) - jnp.where(possible, other, 0)
  return jnp.sum(probs * ratio, axis=-1)


def _log_softmax(logits):
  return jax.nn.log_softmax(_wide(logits), axis=-1)


def _wide(x):
  return x.astype(jnp.float32)
