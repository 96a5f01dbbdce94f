"""Continuous batching: rows that finish make room for the next prompts.

A prompt gets the same tokens as it would alone, because its random bits depend
on its request id, and not on the row or the time at which it is decoded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specsample import checks
from specsample import sampling as sampling_lib
from specsample import sharding
from specsample import stopping
from specsample.drafter import Drafter
from specsample.loop import refill
from specsample.loop import request as request_lib
from specsample.loop.decoder import Decoder
from specsample.memory import history as history_lib
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import Array, ArrayLike, Model, Output, Params, Verifier


def generate_all(
  params: Params,
  prompts: Sequence[Sequence[int]],
  key: Array,
  *,
  request_ids: ArrayLike | None = None,
  model: Model,
  drafter: Drafter,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  stop: Stop = Stop(),
  max_length: int | None = None,
  batch_size: int = 16,
  group_size: int | None = None,
  history: history_lib.History | None = None,
  log_probs: bool = True,
) -> Iterator[Output]:
  """Continues any number of prompts, each as `generate` would on its own.

  Every pass reads caches as large as the longest prompt needs, so decode
  prompts of a few hundred and of many thousand tokens in separate calls.

  Args:
    params, key, model, drafter, verify, stop: as in `generate`.
    prompts: N lists of token ids.
    request_ids: [N] int32, default 0..N-1. Together with the key they determine
      each prompt's tokens.
    sampling: sampling settings, shared by all prompts or one value per prompt
      [N].
    max_new_tokens: the most tokens to emit per prompt: one number, or one per
      prompt.
    max_length: capacity of a row's cache in tokens, prompt included; default
      what the longest prompt needs. A row that fills it stops.
    batch_size: number of rows that are decoded at once.
    group_size: number of rows that are refilled at once. A finished row waits
      for the others of its group and shares its prefill with them. The default
      is 1, and on a mesh the number of parts that the batch is divided into,
      but at most an eighth of the batch.
    history: receives each prompt with its continuation once that is done, and
      later drafts look it up: it is the store 'history' of `drafters.Suffix` or
      `Either`. It may already hold texts of earlier calls, drawn with other
      keys.
    log_probs: as in `generate`.

  Returns:
    An iterator over one `Output` per prompt, in the order of the prompts, each
    as soon as all earlier ones are done too. An output is on the host and has
    one row [1, ...]; M is that prompt's own max_new_tokens.

  Raises:
    ValueError: an argument is out of range; for a prompt, the message gives its
      index. Nothing has been compiled yet.
  """
  if sharding.is_traced():
    raise ValueError(
      'generate_all runs on the host, outside of jax.jit and the like: call '
      'generate there'
    )
  decoder = Decoder(model, drafter, verify)
  stopping.check(stop, model)
  todo = jobs(prompts, request_ids, sampling, max_new_tokens, model)
  if not todo:
    return iter(())
  longest = max(len(job.prompt) + job.max_new_tokens for job in todo)
  if max_length is not None:
    longest = checks.count('max_length', max_length)
  longest = min(longest, model.max_length)
  batch_size = min(checks.count('batch_size', batch_size), len(todo))
  if group_size is None:
    group_size = default_group_size(batch_size)
  batch = refill.Batch(
    decoder=decoder,
    stop=stop,
    batch_size=batch_size,
    max_length=longest,
    max_new_tokens=min(
      max(job.max_new_tokens for job in todo), model.max_length
    ),
    group_size=group_size,
    log_probs=log_probs,
  )
  return _in_order(finished(batch, params, key, todo, history))


def finished(
  batch: refill.Batch,
  params: Params,
  key: Array,
  todo: Sequence[refill.Job],
  history: history_lib.History | None,
) -> Iterator[refill.Finished]:
  """Runs jobs; a history receives each text, and drafts look it up.

  Raises:
    ValueError: an argument does not fit. Nothing has been compiled yet.
  """
  if history is not None:
    params = _with_history(params, batch.decoder.drafter, history)
    if history.vocab_size != batch.decoder.model.vocab_size:
      raise ValueError(
        f'the history is for {history.vocab_size:,} tokens, but the target has '
        f'{batch.decoder.model.vocab_size:,}: give History(vocab_size='
        f'{batch.decoder.model.vocab_size})'
      )
  batch.check(params, key, todo)
  if history is None:
    return batch.run(params, key, todo)
  # A coupled row emits the same tokens whatever is drafted.
  if not batch.decoder.verify.positional:
    is_drawn = lambda job: job.sampling.temperature > 0
    history.claim(key, [job.request_id for job in filter(is_drawn, todo)])

  def learn(params, done):
    length = int(done.output.lengths[0])
    text = [*done.job.prompt, *done.output.tokens[0, :length]]
    if not history.add(text):
      return params
    return _with_history(params, batch.decoder.drafter, history)

  return batch.run(params, key, todo, learn)


def default_group_size(batch_size: int) -> int:
  """Returns the default number of rows that are refilled at once."""
  return max(1, min(sharding.batch_parts(), batch_size // 8))


def jobs(
  prompts: Any,
  request_ids: ArrayLike | None,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  model: Model,
) -> list[refill.Job]:
  """Returns a job per prompt, given the arguments of `generate_all`."""
  if not isinstance(prompts, Iterable):
    request_lib.pad_prompts(prompts)  # raises ValueError
  is_array = isinstance(prompts, (np.ndarray, jax.Array))
  if is_array and prompts.ndim > 1:
    raise ValueError(
      f'prompts is an array of shape {prompts.shape}, in which padding cannot '
      'be told from text: give a list of prompts, each without padding'
    )
  prompts = list(prompts)
  count = len(prompts)
  settings = sampling_lib.per_row(sampling, count, model.vocab_size)
  ids = request_lib.ids(request_ids, count)
  most = request_lib.counts('max_new_tokens', max_new_tokens, count)
  found = []
  for i, prompt in enumerate(prompts):
    with refill.named(i):
      padded, lengths = request_lib.pad_prompts([prompt])
    job = refill.Job(
      index=i,
      prompt=padded[0, : lengths[0]],
      request_id=int(ids[i]),
      sampling=jax.tree.map(lambda x, i=i: x[i], settings),
      max_new_tokens=int(most[i]),
    )
    found.append(job)
  return found


def _with_history(params, drafter, history) -> Params:
  checks.instance(
    'history',
    history,
    history_lib.History,
    'give History(vocab_size=...), or leave it out',
  )
  return drafter.with_store(params, 'history', history.store)


def _in_order(finished: Iterator[refill.Finished]) -> Iterator[Output]:
  there: dict[int, Output] = {}
  expected = 0
  for done in finished:
    there[done.job.index] = done.output
    while expected in there:
      yield there.pop(expected)
      expected += 1
