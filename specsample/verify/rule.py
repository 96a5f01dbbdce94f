"""What verification rules share. Everything here is for one sequence."""

import jax
import jax.numpy as jnp

from specsample import sampling
from specsample import sharding
from specsample import streams
from specsample import types
from specsample.types import Array, Draft, Law, Verdict


def check_law(name: str, draft: Draft, exact: frozenset[types.DraftLaw]):
  """Refuses a draft whose law the rule is not exact for.

  Raises:
    ValueError: at trace time, naming the law and those that are accepted.
  """
  if draft.law not in exact:
    accepted = sorted(law.value for law in exact)
    raise ValueError(
      f'verify.{name} is not exact for drafts of law {draft.law.value!r}, only '
      f'for {accepted}: choose a verifier made for this drafter'
    )
  if (draft.probs is None) != (draft.law is types.DraftLaw.POINT_MASS):
    given = 'no' if draft.probs is None else 'an array of'
    raise ValueError(
      f'a draft of law {draft.law.value!r} came with {given} probabilities: '
      'a point mass has probs=None, a sampled draft the distribution of each '
      'token'
    )


def draft_probs(draft: Draft, target_probs: Array) -> Array:
  """The law [K, V] of each drafted token: zeros where nothing was drafted."""
  if draft.probs is not None:
    return draft.probs
  return jax.nn.one_hot(
    draft.tokens, target_probs.shape[-1], dtype=target_probs.dtype
  )


def of_tokens(probs: Array, tokens: Array) -> Array:
  """The probability [K] of each of tokens [K]; 0 for token -1."""
  chosen = sharding.pick(probs, jnp.maximum(tokens, 0))
  return jnp.where(tokens >= 0, chosen, 0)


def ratio(numerator: Array, denominator: Array) -> Array:
  """numerator / denominator, 0 where the denominator is 0."""
  is_zero = denominator == 0
  return jnp.where(is_zero, 0, numerator / jnp.where(is_zero, 1, denominator))


def stop_at_rejection(accept: Array) -> Array:
  """Probabilities [K + 1] of how many drafts precede the first rejected one.

  `accept` [K] are those of accepting each draft once it is reached.
  """
  one = jnp.ones(1, accept.dtype)
  reached = jnp.cumprod(jnp.concatenate([one, accept]))
  return reached * (1 - jnp.concatenate([accept, 0 * one]))


def normalise(weights: Array, fallback: Array) -> Array:
  """Weights [..., V] scaled to sum 1; rows that sum to 0 are the fallback's."""
  mass = jnp.sum(weights, axis=-1, keepdims=True)
  return jnp.where(mass > 0, ratio(weights, mass), fallback)


def draw(key: Array, draft: Draft, law: Law) -> Verdict:
  """One draw of (stop, next token) from a law."""
  num_accepted = sampling.draw(streams.accept_key(key), law.stop)
  num_drafted = jnp.sum(draft.tokens >= 0)
  next_key = jnp.where(
    num_accepted < num_drafted,
    streams.residual_key(key),
    streams.bonus_key(key),
  )
  probs = sharding.row(law.next, num_accepted, None)
  next_token = sampling.draw(next_key, probs)
  return Verdict(num_accepted=num_accepted, next_token=next_token)
