"""Why greedy outputs part: a numerical tie, or a fault.

Passes of another shape round differently, so that in bfloat16 a speculative run
and an autoregressive one may choose different tokens where two are about
equally likely. At the first difference the target is run over what both wrote
before: in passes of one token as the autoregressive run, in passes of N + 1
tokens as the speculative one, and in float32, which is the arbiter. It is a tie
if in float32 both tokens are within `bound` of the best, else the outputs
DIFFER for a reason that is no rounding. Logits are those that were chosen from:
with the run's penalties and bias.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specsample
from specsample import sampling as sampling_lib
from specsample import sharding
from specsample.loop import request
from specsample.types import Array, Model, Params, TokenCounts

# Logits of float32 closer than that are a tie: passes of another shape add in
# another order, which moves them by less.
_FLOAT32_BOUND = 1e-4
# Half of the distance between neighbours of 8 significant bits, relative.
_UNIT_ROUNDOFF = 2.0**-8
# The probability that an error is larger than the bound is below 1e-5.
_DEVIATIONS = 5.0


@dataclasses.dataclass(frozen=True)
class Reading:
  """What the target says at a position, by passes of one kind."""

  best: int  # the tokens of the largest two logits
  second: int
  margin: float  # between these two logits
  lead: float  # of the baseline's token over the method's


@dataclasses.dataclass(frozen=True)
class Audit:
  """The readings at the first difference, and what follows from them."""

  one_token: Reading  # of passes of one token, in the dtype of the run
  block: Reading  # of passes of N + 1 tokens, in the dtype of the run
  float32: Reading
  # What rounding may move the logits of the two against the best one's; float32
  # logits, as the margins.
  bound: float
  is_tie: bool

  def to_json(self) -> dict[str, Any]:
    """As the journal and result.json have it."""
    return dataclasses.asdict(self)


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
  """Runs the target over what two greedy outputs have in common.

  Args:
    params: the target's, in the dtype of the run.
    prompt: at least one token.
    common: the tokens that both emitted, up to the first difference.
    token: what the method emitted then. baseline_token: the baseline.
    model: the target.
    width: N + 1, the tokens of a pass of the method.
    starts: behind how many of `common` each of its rounds began, from 0 on; if
      not known a pass begins every `width` tokens.
    batch_size: rows of the run; so many are fed here, all the same.
    max_new_tokens: of the run, so that all its audits share a program.
    sampling: of the row, scalars and a bias [V]; its temperature is not read.
  """
  padded, _ = specsample.pad_prompts([list(prompt)])
  chunk = min(request.PREFILL_CHUNK, padded.shape[1])
  room = padded.shape[1] + max_new_tokens
  pair = np.asarray([token, baseline_token], np.int32)

  length = len(prompt) + len(common)
  fed = np.zeros(room + 2 * max(chunk, width), np.int32)
  fed[:length] = [*prompt, *common]

  choosing = (
    dataclasses.replace(
      sampling, temperature=1.0, top_k=None, top_p=None, min_p=None
    ),
    _counts(sampling, prompt, common, model.vocab_size),
  )

  def read(model, width, firsts, batch_size):
    ends = np.full(fed.size, length, np.int32)
    ends[: len(firsts)] = firsts
    logits, hidden = _behind(
      params,
      *(fed, ends, np.int32(len(firsts))),
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
  # On a TPU float32 alone does not say that products are of float32.
  with jax.default_matmul_precision('highest'):
    exact = _in_float32(model)
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
  """JSON has no infinity, which an id that is no token is behind by."""
  return float(np.nan_to_num(x))


def _counts(sampling, prompt, common, vocab_size) -> TokenCounts | None:
  """What the penalties count where the outputs part."""
  if not sampling.penalised:
    return None
  # On the host, where no other number of tokens is another program.
  count = lambda tokens: jnp.asarray(
    np.bincount(np.asarray(tokens, np.int32), minlength=vocab_size), jnp.int32
  )
  return TokenCounts(prompt=count(prompt), generated=count(common))


@jax.jit
def _chosen_from(sampling, counts, logits) -> Array:
  """What a greedy run takes the largest of, up to a constant; from logits [V].

  With penalties or a bias it is log-probabilities: at temperature 1 `warp` is
  the softmax of the logits that they leave.
  """
  if counts is None and sampling.logit_bias is None:
    return logits
  # Divided as decoding has them.
  logits = sharding.constrain(logits, sharding.Axis('vocab', logits.size))
  none = jnp.full(1, -1, jnp.int32)
  probs = sampling_lib.warp(sampling, counts, logits, none)
  # A token that is forbidden has none.
  probs = jnp.maximum(probs, jnp.finfo(probs.dtype).tiny)
  return sharding.replicate(jnp.log(probs))


def _in_float32(model: Any) -> Any:
  return dataclasses.replace(model, dtype='float32')


@functools.partial(
  jax.jit, static_argnames=('model', 'chunk', 'width', 'batch_size')
)
def _behind(
  params, tokens, firsts, count, *, model, chunk, width, batch_size
) -> tuple[Array, Array]:
  """The logits [V] behind the last of tokens [S], and the vector [D] that they
  are made of.

  The tokens before `firsts[0]` are fed in chunks, as a prefill does it, the
  others in `count` passes of `width`. What a pass feeds from the first token of
  the next one on is not kept, and so behind the last token, `firsts[count]`.
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
  """The weights in another dtype; integers and what scales them stay."""
  # A weight of int8 is a node of its own: its scale is float32 already.
  return jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, params
  )


@functools.partial(jax.jit, static_argnames=('model',))
def _bounds(params, hidden, best, others, sampling, counts, *, model) -> Array:
  """By how much rounding may move logits [n] against that of the best token.

  The difference of two logits is a function f of the vector h [D] that they are
  made of; to first order an error e of h moves it by sum_d f'_d e_d. h is what
  is left of a stream to which 2 L + 2 results were added or that was scaled,
  each time rounded to bfloat16: relative to a component an error of at most u =
  2^-8, of either sign, which the stream hands on. Independent of each other,
  these are together beyond t u sqrt((2 L + 2) sum_d (f'_d h_d)^2) with a
  probability below 2 exp(-t^2 / 2) (Hoeffding; so Higham and Mary, 2019). What
  layers make of the errors that they read is not counted; docs/divergence.md
  has how the bound compares with errors that were measured.
  """
  params = _cast(params, model.dtype)

  def lead(hidden, other):
    # A row for each part of the batch, all the same.
    rows = hidden + sharding.zeros(
      (sharding.batch_parts(), 1, hidden.size),
      hidden.dtype,
      *('batch', None, None),
    )
    logits = sharding.replicate(model.unembed(params, rows))
    logits = _chosen_from(sampling, counts, logits[0, 0])
    return logits[best] - logits[other]

  slopes = jax.vmap(jax.grad(lead), (None, 0))(hidden, others)
  spread = jnp.sqrt(jnp.sum((slopes * hidden) ** 2, axis=1))
  num_roundings = 2 * model.num_layers + 2
  return _DEVIATIONS * _UNIT_ROUNDOFF * num_roundings**0.5 * spread
