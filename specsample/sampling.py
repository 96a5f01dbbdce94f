"""The distribution that is actually sampled from, computed from logits.

Baseline, drafter and verifier all call the same `warp`, so that a draft is
verified against the distribution it was drawn from.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.constraint import Constraint
from specsample.types import Array, ArrayLike, TokenCounts

# Larger vocabularies are sampled in two steps: first a block, then a token of
# it. Almost all models have a vocabulary size that splits into equal blocks.
_NUM_BLOCKS = 256
_FEWEST_BLOCKS = 16


@types.pytree
class Sampling:
  """Sampling settings, each a scalar or one value per row [B].

  A setting left at None is not compiled at all. Settings are applied in the
  order of Hugging Face: bias, penalties, constraint, temperature, top-k, top-p,
  min-p. Tokens tied with the last one kept by top-k or top-p are kept too.
  """

  # 0 is greedy: the limit, a one-hot distribution at the most likely token.
  temperature: ArrayLike | float = 0.0
  # Keeps the k most likely tokens; 0 keeps all.
  top_k: ArrayLike | float | None = None
  # Keeps the smallest set with this mass, in (0, 1] (Holtzman, 1904.09751).
  top_p: ArrayLike | float | None = None
  # Keeps tokens at least this likely relative to the best one, in [0, 1].
  min_p: ArrayLike | float | None = None
  # Divides positive and multiplies negative logits of every token in the prompt
  # or the output, > 0 (Keskar et al., 1909.05858).
  repetition_penalty: ArrayLike | float | None = None
  # Subtracted once from the logit of every emitted token.
  presence_penalty: ArrayLike | float | None = None
  # Subtracted from a token's logit for each time it was emitted.
  frequency_penalty: ArrayLike | float | None = None
  # [V] or [B, V], added to the logits; -inf forbids a token.
  logit_bias: ArrayLike | None = None
  # Forbids tokens by those before them, as a grammar does:
  # docs/getting_started.md.
  constraint: Constraint | None = None

  @property
  def penalised(self) -> bool:
    """Whether a penalty is set, for which tokens have to be counted."""
    return not (
      self.repetition_penalty is None
      and self.presence_penalty is None
      and self.frequency_penalty is None
    )


# Larger penalties could turn finite logits into infinite ones.
_LARGEST = 1e30
# The condition on each value, as a test and in words.
_RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
  'temperature': (lambda x: x >= 0, 'finite and at least 0; 0 is greedy'),
  'top_k': (
    lambda x: x >= 0,
    'an integer from 0 to 2**31 - 1; 0 or None keeps every token',
  ),
  'top_p': (lambda x: (x > 0) & (x <= 1), 'in (0, 1]; 1 keeps every token'),
  'min_p': (lambda x: (x >= 0) & (x <= 1), 'in [0, 1]; 0 keeps every token'),
  'repetition_penalty': (
    lambda x: (x >= 1 / _LARGEST) & (x <= _LARGEST),
    f'above 0, from {1 / _LARGEST:g} to {_LARGEST:g}; 1 changes nothing',
  ),
  **dict.fromkeys(
    ('presence_penalty', 'frequency_penalty'),
    (
      lambda x: np.abs(x) <= _LARGEST,
      f'finite, up to {_LARGEST:g} in size; 0 changes nothing',
    ),
  ),
}


def per_row(sampling: Sampling, batch_size: int, vocab_size: int) -> Sampling:
  """Checks the settings and gives each row its own: leaves [B] or [B, V].

  Runs on the host; values that are being traced are passed on unchecked.

  Raises:
    TypeError: if the constraint is not a `Constraint` of a hashable automaton.
    ValueError: if a value is out of range, a shape does not fit the batch, or a
      mask does not fit the vocabulary.
  """
  checks.instance(
    'sampling', sampling, Sampling, 'give Sampling(temperature=...)'
  )
  rows: dict[str, Any] = {}
  for name, (holds, expected) in _RANGES.items():
    value = vars(sampling)[name]
    if value is None and name != 'temperature':
      continue
    if not isinstance(value, jax.core.Tracer):
      value = _check(name, value, holds, expected)
    rows[name] = _broadcast(name, value, (batch_size,))
  if sampling.logit_bias is not None:
    bias = sampling.logit_bias
    if not isinstance(bias, jax.core.Tracer):
      bias = _check_bias(bias)
    rows['logit_bias'] = _broadcast(
      'logit_bias', bias, (batch_size, vocab_size)
    )
  constraint = sampling.constraint
  if constraint is not None:
    if not isinstance(constraint, Constraint):
      raise TypeError(
        f'constraint is {constraint!r}: give a Constraint(automaton=...)'
      )
    rows['constraint'] = constraint.per_row(batch_size, vocab_size)
  return Sampling(**rows)


def _check(name, value, holds, expected):
  given = checks.numbers(name, value, 'it must be a number, or one per row')
  with np.errstate(over='ignore'):
    cast = given.astype(np.int32 if name == 'top_k' else np.float32)
  # Test the value that will be computed with: 1e-50 becomes 0 in float32, and a
  # device flushes 1e-40 to 0.
  if name != 'top_k':
    cast = np.where(np.abs(cast) < np.finfo(np.float32).tiny, 0, cast)
  exact = name != 'top_k' or np.array_equal(cast, given)
  if not (exact and np.all(np.isfinite(cast)) and np.all(holds(cast))):
    raise ValueError(f'{name} is {given.tolist()}: it must be {expected}')
  return cast


def _check_bias(bias):
  bias = checks.numbers(
    'logit_bias', bias, 'give an array with a number for each token'
  ).astype(np.float32)
  if np.isnan(bias).any() or np.isposinf(bias).any():
    raise ValueError(
      'logit_bias holds NaN or +inf: use a large finite value, or -inf to '
      'forbid a token'
    )
  if np.isneginf(bias).all(axis=-1).any():
    raise ValueError('logit_bias is -inf for every token: allow at least one')
  return bias


def _broadcast(name, value, shape):
  xp = jnp if isinstance(value, jax.core.Tracer) else np
  try:
    return xp.broadcast_to(value, shape)
  except ValueError as error:
    raise ValueError(
      f'{name} has shape {value.shape}, which does not broadcast to {shape}: '
      'give one value, or one per row'
    ) from error


def after(sampling: Sampling, tokens: Array) -> Sampling:
  """Returns one row's settings after emitted tokens [n]; -1 is skipped.

  Only a constraint changes.
  """
  if sampling.constraint is None:
    return sampling
  constraint = sampling.constraint.after(tokens)
  return dataclasses.replace(sampling, constraint=constraint)


def warp(
  sampling: Sampling,
  counts: TokenCounts | None,
  logits: Array,
  drafted: Array,
  is_greedy: Array | None = None,
) -> Array:
  """Returns the distribution to sample from, for one row and one position.

  Args:
    sampling: the row's settings, scalar leaves.
    counts: occurrences [V] of the tokens so far; None if no penalty is set.
    logits: [V], any float dtype; computed in at least float32.
    drafted: [n] int32, the draft tokens before the position, in order, -1 for
      none; penalties count them, and a constraint follows them, as if emitted.
    is_greedy: [] bool, whether the temperature of all rows is 0: then the
      softmax is skipped, which takes 3% of a small model's round on a CPU.

  Returns:
    Probabilities [V], float32 (float64 for float64 logits). All NaN if there is
    no distribution: a logit is NaN or +inf, or every logit is -inf or of a
    forbidden token.
  """
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  logits = adjust(
    sampling, terms(sampling, counts, drafted, logits.size), logits
  )
  greedy = jnp.equal(sampling.temperature, 0)
  temperature = jnp.where(greedy, 1, sampling.temperature)
  largest = jnp.max(logits)
  is_best = indexing.vocab_ids(logits.size) == _first(logits == largest)
  best = is_best.astype(logits.dtype)

  def softmax(logits):
    # Shift before scaling, so that a tiny temperature cannot give inf - inf.
    shifted = (logits - largest) / temperature.astype(logits.dtype)
    return jnp.where(greedy, best, jax.nn.softmax(shifted))

  if is_greedy is None:
    probs = softmax(logits)
  else:
    probs = jax.lax.cond(is_greedy, lambda _: best, softmax, logits)
  probs = jnp.where(jnp.isfinite(largest), probs, jnp.nan)
  if sampling.top_k is not None:
    probs = _normalise(jnp.where(_top_k(probs, sampling.top_k), probs, 0))
  if sampling.top_p is not None:
    probs = _normalise(jnp.where(_top_p(probs, sampling.top_p), probs, 0))
  if sampling.min_p is not None:
    kept = probs >= sampling.min_p * jnp.max(probs)
    probs = _normalise(jnp.where(kept, probs, 0))
  return probs


@types.pytree
class Terms:
  """The inputs of `adjust` for all tokens [V] or for some; None if unset."""

  bias: Array | None
  prompt: Array | None  # int32, occurrences in the prompt
  generated: Array | None  # int32, in the emitted and the drafted tokens
  allowed: Array | None  # bool, by the constraint


def terms(
  sampling: Sampling,
  counts: TokenCounts | None,
  drafted: Array,
  vocab_size: int,
) -> Terms:
  """Returns the terms [V] of one row and position; arguments as in `warp`."""
  vocab = sharding.Axis('vocab', vocab_size)
  divided = lambda x: None if x is None else sharding.constrain(x, vocab)
  prompt, generated, allowed = None, None, None
  if counts is not None:
    is_token = (drafted >= 0).astype(counts.generated.dtype)
    # Otherwise the compiler may keep the counts divided and gather them per
    # node.
    own = sharding.constrain(counts.generated, None)
    generated = own.at[jnp.maximum(drafted, 0)].add(is_token)
    prompt = counts.prompt
  if sampling.constraint is not None:
    allowed = sampling.constraint.mask(drafted)
  return Terms(
    bias=divided(sampling.logit_bias),
    prompt=divided(prompt),
    generated=divided(generated),
    allowed=divided(allowed),
  )


def adjust(sampling: Sampling, terms: Terms, logits: Array) -> Array:
  """Applies bias, penalties and constraint to logits, shaped like the terms.

  What a token's logit becomes increases with it and depends on no other logit.
  """
  if terms.bias is not None:
    logits = logits + terms.bias
  if terms.prompt is not None and terms.generated is not None:
    if sampling.repetition_penalty is not None:
      penalty = sampling.repetition_penalty
      scaled = jnp.where(logits > 0, logits / penalty, logits * penalty)
      is_there = terms.prompt + terms.generated > 0
      logits = jnp.where(is_there, scaled, logits)
    if sampling.presence_penalty is not None:
      logits = logits - sampling.presence_penalty * (terms.generated > 0)
    if sampling.frequency_penalty is not None:
      logits = logits - sampling.frequency_penalty * terms.generated
  if terms.allowed is not None:
    logits = logits + jnp.where(terms.allowed, 0, -jnp.inf)
  return logits


def coupled_scores(
  sampling: Sampling, logits: Array, reference: Array, noise: Array | None
) -> Array:
  """Returns what `draw_coupled` maximises, up to a constant, without softmax.

  For settings without top-k, top-p and min-p; greedily, with any.

  Args:
    sampling: one row's settings, scalar leaves.
    logits: of all tokens or of some, after `adjust`.
    reference: [], near the largest logit, so that a tiny temperature cannot
      overflow.
    noise: of the same tokens, from `coupled_noise`; None if the row is greedy.
  """
  if noise is None:
    return logits
  greedy = jnp.equal(sampling.temperature, 0)
  temperature = jnp.where(greedy, 1, sampling.temperature)
  scores = (logits - reference) / temperature.astype(logits.dtype)
  return scores + jnp.where(greedy, 0, noise)


def most_likely(probs: Array) -> Array:
  """Returns the index [] of the largest of probs [V], the first if tied."""
  return _first(probs == jnp.max(probs))


def is_distribution(probs: Array) -> Array:
  """Returns whether rows [..., V] from `warp` are distributions, as [...]."""
  return ~jnp.isnan(indexing.pick(probs, jnp.zeros((), jnp.int32)))


def draw(key: Array, probs: Array) -> Array:
  """Draws an index from probs [V], which need not sum to 1.

  The index is int32; it is 0 if all of probs are 0.

  First a block of the vocabulary is drawn by its mass, then a token of the
  block: noise for every token would cost as much as a tenth of a small model's
  pass. If the vocabulary is divided, by a power of two, only the masses and the
  chosen block are gathered.

  A token's share of the draws is right to about 1e-6 of that share, whatever
  its place in the vocabulary, down to shares of about 1e-11. (An inverse CDF
  would round every boundary to 1e-7 of the whole mass.)
  """
  size = probs.size
  if size <= _NUM_BLOCKS:
    return _pick(key, probs)
  # No mesh whose size is a power of two divides it into more parts.
  num_parts = math.gcd(size, _NUM_BLOCKS)
  axis = sharding.Axis('vocab', num_parts)
  of_part = size // num_parts
  blocks_of_part = 1
  if num_parts < _FEWEST_BLOCKS:
    blocks_of_part = -(-of_part // _NUM_BLOCKS)
  padding = -of_part % blocks_of_part
  parts = sharding.reshape(probs, (num_parts, of_part), axis, None)
  blocks = sharding.reshape(
    jnp.pad(parts, ((0, 0), (0, padding))),
    (num_parts * blocks_of_part, (of_part + padding) // blocks_of_part),
    axis,
    None,
  )
  block_key, token_key = jax.random.split(key)
  block = _pick(block_key, jnp.sum(blocks, axis=1))
  token = _pick(token_key, indexing.row(blocks, block, axis))
  padded_before = block // blocks_of_part * padding
  return block * blocks.shape[1] + token - padded_before


def draw_coupled(key: Array, probs: Array) -> Array:
  """Draws argmax(log probs + Gumbel noise) of probs [V], an int32 index.

  With the same key, similar distributions mostly give the same index.
  """
  scores = jnp.log(probs) + coupled_noise(key, probs.size, probs.dtype)
  # If probs are NaN, this is still a valid index.
  return jnp.minimum(_first(scores == jnp.max(scores)), probs.size - 1)


def coupled_noise(
  key: Array, vocab_size: int, dtype: Any = jnp.float32
) -> Array:
  """Returns the noise [V] that `draw_coupled` adds."""
  return _noise(key, vocab_size, dtype, sharding.Axis('vocab', vocab_size))


def _pick(key, weights):
  weights = sharding.constrain(weights, None)
  noise = _noise(key, weights.size, weights.dtype, None)
  return jnp.argmax(jnp.log(weights) + noise).astype(jnp.int32)


def _noise(key, size, dtype, axis):
  # The default noise of 23 bits would be too coarse: one draw in a hundred over
  # 128k equally likely tokens is a tie for the largest, which the lower index
  # wins, and no token gets less than one draw in ten million.
  return jax.random.gumbel(
    key, (size,), dtype, mode='high', out_sharding=sharding.of_new(axis)
  )


def _first(flags):
  """Returns the first index [] of flags [V] that is set, or V if none is.

  Takes a minimum because, unlike argmax, it can be computed by parts if the
  vocabulary is divided.
  """
  return jnp.min(jnp.where(flags, indexing.vocab_ids(flags.size), flags.size))


def _normalise(probs):
  return probs / jnp.sum(probs)


def _top_k(probs, k):
  enough = lambda kept: jnp.sum(kept, axis=-1) >= k
  return (k == 0) | _smallest_set(probs, enough)


def _top_p(probs, p):
  enough = lambda kept: jnp.sum(jnp.where(kept, probs, 0), axis=-1) >= p
  return (p >= 1) | _smallest_set(probs, enough)


def _smallest_set(probs, enough):
  """Returns the mask of the smallest set {probs >= threshold} that is `enough`.

  Bisects the bits of the threshold: floats in [0, 1] are ordered like their
  bits, so no sort is needed, and a divided vocabulary is not gathered. `enough`
  takes masks [n, V] and returns [n].
  """
  integer = jnp.uint64 if probs.dtype == jnp.float64 else jnp.uint32
  bits = jax.lax.bitcast_convert_type(probs, integer)
  num_bits = 8 * probs.dtype.itemsize - 2  # minus sign and top exponent bit
  # If the vocabulary is divided, each step waits for an all-reduce, so take
  # fewer steps and try more thresholds in each.
  is_divided = sharding.is_divided(sharding.Axis('vocab', probs.size))
  step_bits = 3 if is_divided else 1
  num_steps = -(-num_bits // step_bits)
  digits = jnp.arange(1, 1 << step_bits, dtype=integer)

  def body(i, threshold):
    shift = (step_bits * (num_steps - 1 - i)).astype(integer)
    raised = threshold | (digits << shift)
    digit = jnp.sum(enough(bits >= raised[:, None]), dtype=integer)
    return threshold | (digit << shift)

  # Not a constant: a loop mapped over a divided batch cannot start from one.
  zero = jnp.max(bits) ^ jnp.max(bits)
  return bits >= jax.lax.fori_loop(0, num_steps, body, zero)
