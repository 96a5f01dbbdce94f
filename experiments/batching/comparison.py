"""The same requests, decoded in static batches and with refilled rows."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import gin
import jax
import numpy as np

from experiments import methods as methods_lib
from experiments.command import clock
from experiments.command import units as units_lib
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import rows
import specsample
from specsample import checks
from specsample.loop import continuous
from specsample.loop import refill
from specsample.loop import request

STATIC, REFILLED = 'static', 'refilled'


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
  """A comparison of static batches with refilled rows.

  Attributes:
    evaluation: the target, the methods, and the number of rows that are decoded
      at once; its `max_new_tokens` is not used.
    num_requests: the number of requests, which cycle through the prompts.
    max_new_tokens: the most new tokens of a request. Requests cycle through
      these numbers, and a repeated prompt gets another one each time. EOS may
      end an answer earlier.
    group_size: the rows that are refilled at once, as in `generate_all`.
    repeats: how often each way of decoding is measured.
  """

  evaluation: evaluation_lib.Evaluation
  num_requests: int = 48
  max_new_tokens: Sequence[int] = (16, 32, 64, 128)
  group_size: int | None = None
  repeats: int = 3

  def __post_init__(self):
    """Raises ValueError if nothing would be measured or a group is empty."""
    checks.counts(self, ('num_requests', 'repeats'))
    if self.group_size is not None:
      checks.counts(self, ('group_size',))
    if not self.max_new_tokens or not all(
      map(checks.is_count, self.max_new_tokens)
    ):
      raise ValueError(
        f'Comparison.max_new_tokens is {self.max_new_tokens}: give at '
        'least one number, each at least 1'
      )

  @property
  def num_rows(self) -> int:
    """The number of rows that are refilled."""
    return min(self.evaluation.batch_size, self.num_requests)

  @property
  def num_refilled_at_once(self) -> int:
    """The number of these rows that are refilled at once."""
    if self.group_size is None:
      return continuous.default_group_size(self.num_rows)
    return min(self.group_size, self.num_rows)

  def check(self, tokens: Sequence[list[int]]) -> None:
    """Checks that the prompts' tokens can be decoded with these settings.

    Raises:
      ValueError: if they cannot; names the setting.
    """
    longest = max(self.max_new_tokens)
    dataclasses.replace(self.evaluation, max_new_tokens=longest).check(tokens)

  def requests(self, tokens: Sequence[list[int]]) -> list['Request']:
    """Returns all requests, in the order in which they are decoded."""
    found = []
    for i in range(self.num_requests):
      turn, prompt = divmod(i, len(tokens))
      most = self.max_new_tokens[(turn + prompt) % len(self.max_new_tokens)]
      found.append(Request(i, tokens[prompt], most))
    return found


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt, and the most tokens to continue it by."""

  number: int  # selects the random stream
  prompt: list[int]
  max_new_tokens: int


def units(
  comparison: Comparison, tokens: Sequence[list[int]]
) -> Iterator[units_lib.Unit]:
  """Yields the units of work; the two ways take turns, as do the methods."""
  requests = comparison.requests(tokens)
  for repeat in range(comparison.repeats):
    for name, method in comparison.evaluation.methods.items():
      for way, decode, warm_up in (
        (STATIC, _static, _compile_static),
        (REFILLED, _refilled, _compile_refilled),
      ):
        yield units_lib.Unit(
          f'{name}, {way}, {repeat + 1} of {comparison.repeats}',
          (way, name, repeat),
          functools.partial(_timed, decode, comparison, method, requests),
          program=(name, way),
          warm_up=functools.partial(warm_up, comparison, method, requests),
        )


def _timed(decode: Callable[..., list], comparison, method, requests):
  outputs, seconds = clock.seconds(decode, comparison, method, requests)
  lengths = [int(output.lengths[0]) for output in outputs]
  shares = clock.by_tokens(seconds, lengths)
  generations = []
  for request_, output, length, share in zip(
    requests, outputs, lengths, shares, strict=True
  ):
    generation = rows.Generation(
      batch=0,
      category='',
      prompt_tokens=len(request_.prompt),
      tokens=output.tokens[0, :length].tolist(),
      log_probs=rows.listed(output.log_probs, 0, length),
      seconds=share,
      stats=specsample.stats.summarize(output),
    )
    generations.append(generation.to_json())
  return {'seconds': seconds, 'generations': generations}


def _static(comparison, method, requests) -> list[specsample.Output]:
  """Decodes batch by batch, like `evaluate`, with caches as when refilled."""
  outputs = []
  max_length = _max_length(requests)
  for batch in _batches(comparison, requests):
    prompts, lengths = specsample.pad_prompts([one.prompt for one in batch])
    params, key = _params(comparison, method)
    output = specsample.generate(
      params,
      prompts,
      lengths,
      key,
      stop=comparison.evaluation.stop,
      verify=method.verify,
      **_settings(comparison, method, batch, max_length),
    )
    output = jax.device_get(output)
    outputs += [
      jax.tree.map(lambda x, i=i: x[i : i + 1], output)
      for i in range(len(batch))
    ]
  return outputs


def _compile_static(comparison, method, requests) -> Any:
  """Runs the programs of all batches, on one-token prompts for no rounds."""
  max_length = _max_length(requests)
  for batch in _batches(comparison, requests):
    prompts, lengths = specsample.pad_prompts([one.prompt for one in batch])
    params, key = _params(comparison, method)
    state = specsample.prefill(
      params,
      np.zeros_like(prompts),
      np.ones_like(lengths),
      key,
      verify=method.verify,
      **_settings(comparison, method, batch, max_length),
    )
    state = specsample.advance(
      params,
      state,
      model=comparison.evaluation.target.model,
      drafter=method.drafter,
      verify=method.verify,
      stop=comparison.evaluation.stop,
      max_rounds=jax.device_put(np.int32(0)),
    )
    most = max(one.max_new_tokens for one in batch)
    jax.block_until_ready(
      specsample.finish(state, max_new_tokens=most, batch_size=len(batch))
    )


def _refilled(comparison, method, requests) -> list[specsample.Output]:
  return list(
    _generate_all(comparison, method, requests, _max_length(requests))
  )


def _compile_refilled(comparison, method, requests) -> Any:
  """Decodes with refilled rows until each program has been run.

  Only prefill has several programs: requests that are refilled at once are
  padded to the longest of them. A group of each width comes first, and requests
  end after one token.
  """
  size = comparison.num_refilled_at_once
  each = {}
  for start in range(0, len(requests), size):
    group = requests[start : start + size]
    widest = refill.width(max(len(one.prompt) for one in group))
    # Filled up as in `refill`.
    filled = [*group, *[group[-1]] * (size - len(group))]
    each[min(widest, request.PREFILL_CHUNK)] = filled
  first = [one for group in each.values() for one in group]
  jobs = [
    dataclasses.replace(one, max_new_tokens=1) for one in [*first, *requests]
  ]
  # Outputs have as many columns as the longest answer.
  most = max(one.max_new_tokens for one in requests)
  jobs[-1] = dataclasses.replace(jobs[-1], max_new_tokens=most)
  outputs = _generate_all(comparison, method, jobs, _max_length(requests))
  return list(itertools.islice(outputs, len(first)))


def _generate_all(comparison, method, requests, max_length):
  params, key = _params(comparison, method)
  return specsample.generate_all(
    params,
    [one.prompt for one in requests],
    key,
    stop=comparison.evaluation.stop,
    verify=method.verify,
    batch_size=comparison.num_rows,
    group_size=comparison.num_refilled_at_once,
    **_settings(comparison, method, requests, max_length),
  )


def _batches(comparison, requests) -> list[list[Request]]:
  return [
    [requests[i] for i in batch]
    for batch in comparison.evaluation.batches(len(requests))
  ]


def _max_length(requests) -> int:
  """Returns the most tokens that a request has with its answer.

  Both ways have room for this many, because each pass reads the whole cache.
  """
  return max(len(one.prompt) + one.max_new_tokens for one in requests)


def _settings(comparison, method, requests, max_length) -> dict[str, Any]:
  """Returns the arguments that all ways of decoding take."""
  evaluation = comparison.evaluation
  most = [one.max_new_tokens for one in requests]
  return {
    'request_ids': np.asarray([one.number for one in requests], np.int32),
    'model': evaluation.target.model,
    'drafter': method.drafter,
    'sampling': evaluation.sampling,
    'max_new_tokens': np.asarray(most, np.int32),
    'max_length': max_length,
    'log_probs': methods_lib.has_log_probs(method),
  }


def _params(comparison, method):
  evaluation = comparison.evaluation
  params = methods_lib.all_params(evaluation.target, method)
  return params, jax.random.key(evaluation.seed)
