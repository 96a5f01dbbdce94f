"""The reason why greedy outputs differ: a numerical tie, or a fault.

Passes of different shapes round differently, so in bfloat16 a speculative and
an autoregressive run may choose different tokens if two are about equally
likely. At the first difference the target is run over the tokens that both
outputs have in common: in passes of one token as in the autoregressive run, in
passes of N + 1 tokens as in the speculative run, and in float32, which decides.
The difference is a tie if in float32 both tokens are within `bound` of the best
one; otherwise the outputs DIFFER for a reason other than rounding. The logits
are those that the run chose from, with its penalties and bias.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import specsample
from specsample import sampling as sampling_lib
from specsample import sharding
from specsample.loop import request
from specsample.types import Array, Model, Params, TokenCounts

# Float32 logits closer than this are a tie: passes of another shape add in
# another order, which moves the logits by less.
_FLOAT32_BOUND = 1e-4
# Half the relative distance between neighbours of 8 significant bits.
_UNIT_ROUNDOFF = 2.0**-8
# An error is larger than the bound with a probability below 1e-5.
_DEVIATIONS = 5.0


@dataclasses.dataclass(frozen=True)
class Reading:
  """The target's logits at a position, from passes of one kind."""

  best: int  # the tokens with the two largest logits
  second: int
  margin: float  # between these two logits
  lead: float  # of the baseline's token over the method's


@dataclasses.dataclass(frozen=True)
class Audit:
  """The readings at the first difference, and the conclusion from them."""

  one_token: Reading  # from passes of one token, in the run's dtype
  block: Reading  # from passes of N + 1 tokens, in the run's dtype
  float32: Reading
  # How far rounding may move the two tokens' logits relative to the best one's,
  # in float32 logits, like the margins.
  bound: float
  is_tie: bool


def audit(
  params: Params,
  prompt: Sequence[int],
  common: Sequence[int],
  token: int,
  baseline_token: int,
  *,
  model: Model,
  width: int,
  starts: Sequence[int] = (),
  batch_size: int = 1,
  max_new_tokens: int,
  sampling: specsample.Sampling = specsample.Sampling(),
) -> Audit:
  """Runs the target over the tokens that two greedy outputs have in common.

  Args:
    params: the target's parameters, in the run's dtype.
    prompt: at least one token.
    common: the tokens that both emitted, up to the first difference.
    token: the token that the method emitted next.
    baseline_token: the token that the baseline emitted next.
    model: the target.
    width: N + 1, the number of tokens per pass of the method.
    starts: how many tokens of `common` were emitted before each of the method's
      rounds, starting with 0. If empty, a pass begins every `width` tokens.
    batch_size: rows of the run; the audit feeds as many identical rows.
    max_new_tokens: the run's limit, so that all its audits share a program.
    sampling: the row's settings, scalars and a bias [V]; the temperature is
      ignored.
  """
  padded, _ = specsample.pad_prompts([list(prompt)])
  chunk = min(request.PREFILL_CHUNK, padded.shape[1])
  room = padded.shape[1] + max_new_tokens
  pair = np.asarray([token, baseline_token], np.int32)

  length = len(prompt) + len(common)
  fed = np.zeros(room + 2 * max(chunk, width), np.int32)
  fed[:length] = [*prompt, *common]

  # Padded, so that all audits of the run share a program.
  followed = np.full(max_new_tokens, -1, np.int32)
  followed[: len(common)] = common
  choosing = (
    dataclasses.replace(
      sampling_lib.after(sampling, jnp.asarray(followed)),
      temperature=1.0,
      top_k=None,
      top_p=None,
      min_p=None,
    ),
    _counts(sampling, prompt, common, model.vocab_size),
  )

  def read(model, width, firsts, batch_size):
    ends = np.full(fed.size, length, np.int32)
    ends[: len(firsts)] = firsts
    logits, hidden = _last_output(
      params,
      fed,
      ends,
      np.int32(len(firsts)),
      model=model,
      chunk=chunk,
      width=width,
      batch_size=batch_size,
    )
    logits = _chosen_from(*choosing, logits)
    values, best = jax.device_get(jax.lax.top_k(logits, 2))
    chosen = np.asarray(logits)[pair]
    reading = Reading(
      best=int(best[0]),
      second=int(best[1]),
      margin=_finite(values[0] - values[1]),
      lead=_finite(chosen[1] - chosen[0]),
    )
    return reading, float(values[0] - chosen.min()), hidden

  # The last token of the prompt is fed by the run's first round.
  first = len(prompt) - 1
  one_token, _, _ = read(model, 1, range(first, length), batch_size)
  rounds = [first + start for start in starts] or range(first, length, width)
  block, _, _ = read(model, width, rounds, batch_size)
  # On a TPU, dtype float32 alone does not make products float32.
  with jax.default_matmul_precision('highest'):
    exact = dataclasses.replace(cast(Any, model), dtype='float32')
    float32, shortfall, hidden = read(exact, chunk, range(0, length, chunk), 1)
    bound = _FLOAT32_BOUND
    if model.dtype != 'float32':
      others = pair[pair != float32.best]
      bounds = _bounds(
        params, hidden, float32.best, others, *choosing, model=exact
      )
      bound += float(np.max(bounds))
  return Audit(one_token, block, float32, bound, shortfall <= bound)


def _finite(x: np.floating) -> float:
  """Returns a finite number for JSON; padding ids have logits of -inf."""
  return float(np.nan_to_num(x))


def _counts(sampling, prompt, common, vocab_size) -> TokenCounts | None:
  """Returns the penalties' counts at the difference; None without penalties."""
  if not sampling.penalised:
    return None
  # On the host: on the device, each number of tokens would be a new program.
  count = lambda tokens: jnp.asarray(
    np.bincount(np.asarray(tokens, np.int32), minlength=vocab_size), jnp.int32
  )
  return TokenCounts(prompt=count(prompt), generated=count(common))


@jax.jit
def _chosen_from(sampling, counts, logits) -> Array:
  """Returns the values whose largest a greedy run takes, from logits [V].

  They are exact up to a constant. With penalties, a bias or a constraint they
  are log-probabilities: at temperature 1 `warp` returns the softmax of the
  adjusted logits.
  """
  if counts is sampling.logit_bias is sampling.constraint is None:
    return logits
  # Sharded as in decoding.
  logits = sharding.constrain(logits, sharding.Axis('vocab', logits.size))
  none = jnp.full(1, -1, jnp.int32)
  probs = sampling_lib.warp(sampling, counts, logits, none)
  # A forbidden token has probability 0.
  probs = jnp.maximum(probs, jnp.finfo(probs.dtype).tiny)
  return sharding.replicate(jnp.log(probs))


@functools.partial(
  jax.jit, static_argnames=('model', 'chunk', 'width', 'batch_size')
)
def _last_output(
  params, tokens, firsts, count, *, model, chunk, width, batch_size
) -> tuple[Array, Array]:
  """Returns the logits [V] and hidden vector [D] of the last of tokens [S].

  The tokens before `firsts[0]` are fed in chunks, as in a prefill, and the
  others in `count` passes of `width`. A pass keeps only the tokens before the
  start of the next one. For the last pass that is `firsts[count]`, the end of
  the tokens.
  """
  params = _cast(params, model.dtype)
  parts = sharding.batch_parts()
  rows = -(-batch_size // parts) * parts
  tokens = tokens + sharding.zeros(
    (rows, tokens.size), jnp.int32, 'batch', None
  )
  per_row = sharding.zeros((rows,), jnp.int32, 'batch')

  def feed(cache, first, size, end):
    inputs = jax.lax.dynamic_slice(tokens, (0, first), (rows, size))
    output, cache = model.apply(params, inputs, cache)
    return output, model.commit(cache, per_row + end)

  def prefill(i, cache):
    end = jnp.minimum((i + 1) * chunk, firsts[0])
    return feed(cache, i * chunk, chunk, end)[1]

  def go_on(i, cache):
    return feed(cache, firsts[i], width, firsts[i + 1])[1]

  cache = model.init_cache(rows, tokens.shape[1], max(chunk, width))
  cache = jax.lax.fori_loop(0, -(-firsts[0] // chunk), prefill, cache)
  cache = jax.lax.fori_loop(0, count - 1, go_on, cache)
  first, end = firsts[count - 1], firsts[count]
  output, _ = feed(cache, first, width, end)
  logits, hidden = sharding.replicate((output.logits, output.hidden))
  return logits[0, end - 1 - first], hidden[0, end - 1 - first]


def _cast(params, dtype):
  """Casts bfloat16 weights; integers and their scales stay."""
  # An int8 weight is a node of its own, whose scale is float32 already.
  return jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, params
  )


@functools.partial(jax.jit, static_argnames=('model',))
def _bounds(params, hidden, best, others, sampling, counts, *, model) -> Array:
  """Returns how far rounding may move logits [n] relative to the best token's.

  The difference of two logits is a function f of the vector h [D] that they are
  computed from; to first order, an error e of h moves it by sum_d f'_d e_d. h
  is the end of a stream to which results were added or that was scaled, 2 L + 2
  times, each time rounded to bfloat16. Each rounding has an error of at most
  u = 2^-8 relative to a component, of either sign, which the stream carries on.
  If these errors are independent, their sum exceeds
  t u sqrt((2 L + 2) sum_d (f'_d h_d)^2) with a probability below
  2 exp(-t^2 / 2) (Hoeffding's inequality, as in Higham and Mary, 2019). What
  layers make of errors in their inputs is not counted; docs/exactness.md
  compares the bound with measured errors.
  """
  params = _cast(params, model.dtype)

  def lead(hidden, other):
    # One identical row for each part of the batch.
    rows = hidden + sharding.zeros(
      (sharding.batch_parts(), 1, hidden.size),
      hidden.dtype,
      'batch',
      None,
      None,
    )
    logits = sharding.replicate(model.unembed(params, rows))
    logits = _chosen_from(sampling, counts, logits[0, 0])
    return logits[best] - logits[other]

  slopes = jax.vmap(jax.grad(lead), (None, 0))(hidden, others)
  spread = jnp.sqrt(jnp.sum((slopes * hidden) ** 2, axis=1))
  num_roundings = 2 * model.num_layers + 2
  return _DEVIATIONS * _UNIT_ROUNDOFF * num_roundings**0.5 * spread
