"""Groups of samples for reinforcement learning, drawn speculatively.

A policy gradient needs the probability with which each token was drawn. It
comes from the pass of the target that verified the token, so no second pass is
needed, and no mismatch between two programs can enter.
"""

from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample import stopping
from specsample import types
from specsample.drafter import Drafter
from specsample.loop import continuous
from specsample.loop import refill
from specsample.loop.decoder import Decoder
from specsample.memory import history as history_lib
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import Array, ArrayLike, Model, Params, Verifier


@types.pytree
class Rollouts:
  """G continuations of each of N prompts, as padded arrays of fixed shapes.

  There are two log-probabilities and no field `log_probs`, so that neither is
  taken for the other. Both are in float32, 0 past the end of a row, and belong
  to the weights that drew the tokens. If `lossless` is False, the rule drew
  from another distribution than the target's: `warped_log_probs` are then not
  those of the samples, and may be -inf.
  """

  prompts: ArrayLike  # [N, P] int32, each from column 0 on, then 0
  prompt_lengths: ArrayLike  # [N] int32
  tokens: ArrayLike  # [N, G, M] int32, 0 past the end of a row
  lengths: ArrayLike  # [N, G] int32, including the stop token
  # [N, G, M], under the distribution that the tokens were drawn from: after
  # temperature, top-k, top-p, min-p, penalties, bias and constraint.
  warped_log_probs: ArrayLike
  # [N, G, M], under the target at temperature 1, without other settings.
  model_log_probs: ArrayLike
  stop_reason: ArrayLike  # [N, G] int32, a StopReason
  rounds: ArrayLike  # [N, G] int32, target passes since the prefill
  proposed: ArrayLike  # [N, G, K + 1] int32, rounds that drafted i tokens
  accepted: ArrayLike  # [N, G, K + 1] int32, rounds that emitted i drafted ones
  # [N, G] float32, from the call until the sample was there: the last ones, for
  # which the others wait, are the tail of the call.
  seconds: ArrayLike
  lossless: bool = types.static()  # whether the rule has the target's law

  @property
  def mask(self) -> Array:
    """Where `tokens` are tokens: [N, G, M] bool."""
    place = jnp.arange(self.tokens.shape[-1])
    return place < jnp.asarray(self.lengths)[..., None]

  def documents(self) -> dict[str, Array]:
    """Returns prompts with their continuations, as training reads them.

    Returns:
      `tokens` [N * G, P + M] int32, each row a prompt, its continuation right
      behind it, then 0; and `mask` of the same shape, set for the continuation.
      They are a batch of `training.objective.Objective`.
    """
    num_samples, most = self.tokens.shape[1:]
    flat = lambda x: jnp.reshape(x, (-1, *x.shape[2:]))
    repeat = lambda x: jnp.repeat(jnp.asarray(x), num_samples, axis=0)
    prompts = jnp.pad(repeat(self.prompts), ((0, 0), (0, most)))
    place = jnp.arange(prompts.shape[1])
    offset = place - repeat(self.prompt_lengths)[:, None]
    mask = (offset >= 0) & (offset < flat(self.lengths)[:, None])
    new = jnp.take_along_axis(
      flat(self.tokens), jnp.clip(offset, 0, most - 1), axis=1
    )
    return {'tokens': jnp.where(mask, new, prompts), 'mask': mask}

  def score(
    self, target: Params, model: Model, temperature: ArrayLike | float = 1.0
  ) -> Array:
    """Returns log-probabilities [N, G, M] of the tokens under other weights.

    One pass over `documents`. It can be differentiated: exp(score -
    warped_log_probs) is the importance ratio of a policy gradient, if only the
    temperature was set.

    Args:
      target: the target's own parameters, params['target'].
      model: the target.
      temperature: divides the logits; more than 0, and one number or one per
        prompt [N].

    Raises:
      ValueError: `temperature` is neither, or is not more than 0.
    """
    num_prompts, num_samples, most = self.tokens.shape
    temperature = _checked(temperature, num_prompts)
    num_rows = num_prompts * num_samples
    tokens = _rows(self.documents()['tokens'])
    drawn = _rows(jnp.reshape(self.tokens, (num_rows, most)))
    repeat = lambda x: _rows(
      jnp.repeat(jnp.broadcast_to(x, num_prompts), num_samples)
    )
    output, _ = model.apply(target, tokens, model.init_cache(len(tokens), 0))
    place = repeat(self.prompt_lengths)[:, None] - 1 + jnp.arange(most)
    hidden = jnp.take_along_axis(output.hidden, place[..., None], axis=1)
    logits = model.unembed(target, hidden).astype(jnp.float32)
    logits /= repeat(temperature)[:, None, None]
    log_probs = indexing.pick(logits, drawn) - jax.nn.logsumexp(logits, axis=-1)
    # Whole, because the mesh may divide the rows where no prompt begins.
    log_probs = sharding.constrain(log_probs, None, None)[:num_rows]
    return jnp.where(self.mask, log_probs.reshape(self.tokens.shape), 0)


def _checked(temperature, num_prompts):
  """Returns the temperature; if it is traced, only its shape is checked."""
  remedy = f'give a number above 0, or one for each of {num_prompts} prompts'
  given = checks.numbers('temperature', temperature, remedy)
  is_valid = np.shape(given) in ((), (num_prompts,))
  if is_valid and not isinstance(given, jax.core.Tracer):
    is_valid = bool(np.all(given > 0))
  if not is_valid:
    raise ValueError(f'temperature is {temperature}: {remedy}')
  return given


def _rows(x):
  """Divides rows [R, ...] over a mesh, after padding them so that it can."""
  padding = [(0, -len(x) % sharding.batch_parts())] + [(0, 0)] * (x.ndim - 1)
  whole = jnp.pad(x, padding, mode='edge')
  return sharding.constrain(whole, 'batch', *[None] * (x.ndim - 1))


def rollout(
  params: Params,
  prompts: Sequence[Sequence[int]],
  key: Array,
  *,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  num_samples: int,
  max_prompt_length: int,
  max_new_tokens: int,
  stop: Stop = Stop(),
  batch_size: int = 16,
  fewest_rows: int | None = None,
  history: history_lib.History | None = None,
) -> Rollouts:
  """Draws G samples of each prompt, with their log-probabilities.

  If `verify` is lossless, the samples have exactly the law of the policy,
  whatever drafts them, and are independent given the weights.

  The next call compiles nothing if it differs only in the key, the prompts and
  the values of `params` and `sampling`. No reference to `params` is kept, so a
  training step between two calls may donate them. They have to keep their
  dtypes and shardings: on a mesh with Auto axes, set the `out_shardings` of the
  training step.

  Args:
    params: {'target': ..., 'drafter': ...}, as in `generate`.
    prompts: N lists of token ids.
    key: a PRNG key, a new one for each call: jax.random.fold_in(key, step).
      Sample g of prompt n is drawn as the request n * G + g of `generate`.
    model, drafter, verify, stop: as in `generate`.
    sampling: sampling settings, shared by all prompts or one value per prompt
      [N].
    num_samples: G. The samples of a prompt share its prefill if they are
      refilled one after another, unless the history was sorted in between.
    max_prompt_length: P; all prompts are padded to it.
    max_new_tokens: M, the most tokens to emit per sample.
    batch_size: number of rows that are decoded at once; a finished row takes
      the next sample.
    fewest_rows: once no samples are waiting, the batch is halved as rows
      finish, down to this many rows. Each size is compiled once. None: the
      batch keeps its size. A mesh ignores it.
    history: receives the samples as they finish, and later drafts look them up,
      in this call and in the next ones, whatever weights wrote them: it is the
      store 'history' of `drafters.Suffix` or `Either`. It changes no sample's
      distribution. At temperatures above 0 it refuses the key of an earlier
      call, unless the rule is `verify.coupled`.

  Returns:
    The samples, on the host, whatever the order in which they finished.

  Raises:
    ValueError: an argument is out of range or does not fit; the message
      names the leaf of parameters, or the index of a prompt. Nothing has been
      compiled yet.
  """
  if sharding.is_traced():
    raise ValueError('rollout runs on the host: call it outside of jax.jit')
  begin = time.perf_counter()
  decoder = Decoder(model, drafter, verify)
  stopping.check(stop, model)
  for name, value in (
    ('num_samples', num_samples),
    ('max_prompt_length', max_prompt_length),
    ('max_new_tokens', max_new_tokens),
    ('batch_size', batch_size),
  ):
    checks.count(name, value)
  max_length = max_prompt_length + max_new_tokens
  if max_length > model.max_length:
    raise ValueError(
      f'max_prompt_length is {max_prompt_length} and max_new_tokens '
      f'{max_new_tokens}, but the model takes {model.max_length} tokens in '
      'all: lower one of them'
    )
  of_prompts = continuous.jobs(prompts, None, sampling, max_new_tokens, model)
  if not of_prompts:
    raise ValueError('there is no prompt: give at least one')
  padded = np.zeros((len(of_prompts), max_prompt_length), np.int32)
  lengths = np.asarray([len(job.prompt) for job in of_prompts], np.int32)
  for job in of_prompts:
    if len(job.prompt) > max_prompt_length:
      raise ValueError(
        f'prompt {job.index} has {len(job.prompt)} tokens, but '
        f'max_prompt_length is {max_prompt_length}: shorten it or raise the '
        'limit'
      )
    padded[job.index, : len(job.prompt)] = job.prompt
  batch_size = min(batch_size, len(of_prompts) * num_samples)
  batch = refill.Batch(
    decoder=decoder,
    stop=stop,
    batch_size=batch_size,
    max_length=max_length,
    max_new_tokens=max_new_tokens,
    group_size=continuous.default_group_size(batch_size),
    prompt_width=max_prompt_length,
    fewest_rows=fewest_rows,
  )
  samples = [
    dataclasses.replace(job, request_id=job.index * num_samples + i)
    for job in of_prompts
    for i in range(num_samples)
  ]
  done = continuous.finished(batch, params, key, samples, history)
  shape = len(of_prompts), num_samples
  outputs, seconds = {}, np.zeros(shape, np.float32)
  for one in done:
    outputs[one.job.request_id] = one.output
    seconds.flat[one.job.request_id] = time.perf_counter() - begin
  found: Any = jax.tree.map(
    lambda *rows: np.concatenate(rows).reshape(*shape, *rows[0].shape[1:]),
    *(outputs[i] for i in range(len(samples))),
  )
  return Rollouts(
    prompts=padded,
    prompt_lengths=lengths,
    tokens=found.tokens,
    lengths=found.lengths,
    warped_log_probs=found.warped_log_probs,
    model_log_probs=found.log_probs,
    stop_reason=found.stop_reason,
    rounds=found.rounds,
    proposed=found.proposed,
    accepted=found.accepted,
    seconds=seconds,
    lossless=verify.lossless,
  )
