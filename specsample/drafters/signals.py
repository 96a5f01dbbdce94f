"""Signals that drafters give about their drafts, from logits before warping."""

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample.types import Array, Signals


def of_tokens(
  logits: Array, tokens: Array, confidence: Array | None
) -> Signals:
  """Returns signals [...] of tokens [...], each drafted from logits [..., V].

  A token with a logit of -inf is never drafted; signals of token -1 are
  meaningless.
  """
  log_probs = jax.nn.log_softmax(
    logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  )
  chosen = indexing.pick(log_probs, jnp.maximum(tokens, 0))
  return of_log_probs(log_probs, chosen, confidence)


def of_log_probs(
  log_probs: Array, chosen: Array, confidence: Array | None
) -> Signals:
  """Returns signals [...] of tokens with log-probabilities `chosen` [...].

  Args:
    log_probs: [..., n], of the tokens that they were chosen from.
    chosen: [...], of the tokens.
    confidence: [...], as in `types.Signals`.
  """
  return Signals(
    log_prob=chosen,
    max_log_prob=jnp.max(log_probs, axis=-1),
    rank=jnp.sum(log_probs > chosen[..., None], axis=-1, dtype=jnp.int32),
    entropy=_entropy(log_probs),
    confidence=confidence,
  )


def of_top(
  log_probs: Array, values: Array, confidence: Array | None
) -> Signals:
  """Returns signals [..., k] of the k most likely tokens.

  Args:
    log_probs: [..., V].
    values: [..., k], the largest of them, in descending order.
    confidence: [...], the same for all of them.
  """
  like = lambda x: jnp.broadcast_to(x, values.shape)
  return Signals(
    log_prob=values,
    max_log_prob=like(values[..., :1]),
    rank=like(jnp.arange(values.shape[-1], dtype=jnp.int32)),
    entropy=like(_entropy(log_probs)[..., None]),
    confidence=None if confidence is None else like(confidence[..., None]),
  )


def _entropy(log_probs):
  probs = jnp.exp(log_probs)
  return -jnp.sum(probs * jnp.where(probs > 0, log_probs, 0), axis=-1)
