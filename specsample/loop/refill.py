"""A batch whose rows are refilled between compiled runs of rounds.

Finished rows are read out, and the next prompts are prefilled on their own and
written over them (Yu et al., Orca, OSDI 2022).

Shapes are fixed: there is one executable of the loop, one that writes rows, and
at most four of the prefill, one for each chunk size. The number of rows can
shrink once no prompts are waiting; each number is then compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import settings
from specsample import sharding
from specsample import streams
from specsample.loop import certified
from specsample.loop import decode
from specsample.loop import initial
from specsample.loop import request as request_lib
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.types import Array, DecodeState, Output, Params, StopReason

# Prompts are padded to a multiple of this: those that fit into one prefill pass
# then have few sizes, each with an executable of its own.
_WIDTH_MULTIPLE = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
  """A prompt to be continued."""

  index: int  # the caller's number for the prompt, which messages give
  prompt: Sequence[int] | np.ndarray
  request_id: int
  sampling: Sampling  # scalars; all jobs must set the same settings
  max_new_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
  """A job that is done."""

  job: Job
  output: Output  # [1, ...], on the host
  state: DecodeState  # the batch's; donated when the next job is asked for
  row: int  # the job's row in the state


# Returns the parameters to continue with after a job, of the same shapes.
Learn = Callable[[Params, Finished], Params]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(settings.Settings):
  """Rows that jobs take turns in, for callers that create jobs as they go."""

  decoder: Decoder
  stop: Stop = Stop()
  batch_size: settings.Count
  max_length: settings.Count  # of a prompt with its continuation
  max_new_tokens: settings.Count  # the largest of any job
  group_size: settings.Count = 1  # rows that are refilled at once
  # Prompts are padded to at least this many tokens, so that one prefill serves
  # all. None: there is one for each of at most four widths.
  prompt_width: settings.Count | None = None
  # Once no jobs are waiting, the batch is halved as rows finish, down to this
  # many rows. None: its size does not change.
  fewest_rows: settings.Count | None = None
  log_probs: bool = True  # whether they are computed

  def check(self, params: Params, key: Array, jobs: Sequence[Job]) -> None:
    """Runs the checks of `decode.generate`; names a prompt by its job's index.

    Raises:
      ValueError: an argument does not fit; the message says how to fix it.
    """
    model = self.decoder.model
    capacity = min(self.max_length, model.max_length)
    for job in jobs:
      with named(job.index):
        row = checks.integers('prompt', job.prompt, 'give token ids')[None]
        lengths = np.asarray([row.size])
        request_lib.check_prompts(row, lengths, capacity, model)
    request = self._request(params, key, jobs[0].sampling)
    for job in jobs:
      with named(job.index):
        certified.check_sampling(self.decoder, job.sampling)
    decode.check_rule(self.decoder, params, request)

  def run(
    self,
    params: Params,
    key: Array,
    jobs: Iterable[Job],
    learn: Learn = lambda params, done: params,
  ) -> Iterator[Finished]:
    """Continues jobs until none is left, yielding each when it is done.

    The order depends on the arguments alone.
    """
    waiting = iter(jobs)
    take = lambda: list(itertools.islice(waiting, self._group))
    running: dict[int, Job] = {}
    num_rows = self.batch_size
    state: DecodeState | None = None
    latest: _Prefilled | None = None
    while True:
      free = [row for row in range(num_rows) if row not in running]
      while len(free) >= self._group and (group := take()):
        if state is None:
          request = self._request(params, key, group[0].sampling)
          state = _empty(self.decoder, params, request)
        rows, free = free[: len(group)], free[len(group) :]
        running |= dict(zip(rows, group, strict=True))
        latest = self._prefilled(params, key, group, latest)
        fresh = latest.state
        state = _replace(state, fresh, _places(rows, fresh))
      if state is None or not running:
        return
      if len(free) >= self._group:  # no job waits
        kept = self._fewer_rows(num_rows, running)
        if len(kept) < num_rows:
          state = _keep_rows(state, np.asarray(kept, np.int32))
          running = {kept.index(row): job for row, job in running.items()}
          num_rows = len(kept)
          free = [row for row in range(num_rows) if row not in running]
      state = decode.advance(
        self.decoder,
        params,
        state,
        stop=self.stop,
        # Every round emits at least one token per running row.
        max_rounds=np.int32(self.max_length),
        max_finished=np.int32(max(1, self._group - len(free))),
      )
      output = jax.device_get(
        decode.finish(state, max_new_tokens=self.max_new_tokens)
      )
      for row, job in sorted(running.items()):
        if output.stop_reason[row] != StopReason.RUNNING:
          del running[row]
          done_now = Finished(job, _row(output, row, job), state, row)
          params = learn(params, done_now)
          yield done_now

  @property
  def _group(self) -> int:
    return min(self.group_size, self.batch_size)

  def _fewer_rows(self, num_rows: int, running: dict[int, Job]) -> list[int]:
    """Returns the rows to keep: all, or the running ones and some padding."""
    # On a mesh, rows stay where they are.
    fewest = None if sharding.batch_parts() > 1 else self.fewest_rows
    fewest = num_rows if fewest is None else fewest
    wanted = max(len(running), fewest)
    while num_rows >= 2 * wanted:
      num_rows //= 2
    others = [row for row in range(self.batch_size) if row not in running]
    return sorted(running) + others[: num_rows - len(running)]

  def _request(self, params, key, sampling) -> request_lib.Request:
    """Returns a request of placeholder rows, which will be overwritten."""
    return request_lib.check(
      self.decoder,
      params,
      np.zeros((self.batch_size, 1), np.int32),
      np.ones(self.batch_size, np.int32),
      key,
      sampling=sampling,
      max_new_tokens=1,
      max_length=self.max_length,
      log_probs=self.log_probs,
    )

  def _prefilled(
    self, params, key, jobs, latest: '_Prefilled | None'
  ) -> '_Prefilled':
    """Prefills a group, or reuses the latest one if it has the same texts."""
    # Groups of any size are padded to one shape.
    jobs = [*jobs, *[jobs[-1]] * (self._group - len(jobs))]
    if latest is not None and latest.is_of(params, jobs):
      state = _renumbered(latest.state, key, [job.request_id for job in jobs])
    else:
      state = self._prefill(params, key, jobs)
    return _Prefilled(params, jobs, state)

  def _prefill(self, params, key, jobs) -> DecodeState:
    longest = max(self.prompt_width or 0, *(len(job.prompt) for job in jobs))
    columns = longest if self.prompt_width else width(longest)
    prompts = np.zeros((len(jobs), columns), np.int32)
    for prompt, job in zip(prompts, jobs, strict=True):
      prompt[: len(job.prompt)] = job.prompt
    stack = lambda *values: np.stack(values)
    return decode.prefill(
      self.decoder,
      params,
      prompts,
      np.asarray([len(job.prompt) for job in jobs], np.int32),
      key,
      request_ids=np.asarray([job.request_id for job in jobs], np.int32),
      sampling=jax.tree.map(stack, *[job.sampling for job in jobs]),
      max_new_tokens=np.asarray([job.max_new_tokens for job in jobs]),
      max_length=self.max_length,
      log_probs=self.log_probs,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Prefilled:
  """A group of jobs after their prefill with these parameters."""

  params: Params
  jobs: Sequence[Job]
  state: DecodeState

  def is_of(self, params: Params, jobs: Sequence[Job]) -> bool:
    """Returns whether other jobs differ only in their numbers."""
    is_same = lambda a, b: (
      a.prompt is b.prompt
      and a.sampling is b.sampling
      and a.max_new_tokens == b.max_new_tokens
    )
    return params is self.params and all(map(is_same, self.jobs, jobs))


def _renumbered(
  state: DecodeState, key: Array, request_ids: Sequence[int]
) -> DecodeState:
  """Returns a prefilled state as that of other requests for the same texts."""
  missing = state.length.size - len(request_ids)  # rows that pad the mesh
  ids = np.pad(np.asarray(request_ids, np.int32), (0, missing), mode='edge')
  ids, key = sharding.place([ids, key], [('batch',), ()])
  return dataclasses.replace(state, key=_row_keys(key, ids), request_id=ids)


@jax.jit
def _row_keys(key: Array, request_ids: Array) -> Array:
  return jax.vmap(streams.row_key, (None, 0))(key, request_ids)


def width(longest: int) -> int:
  """Returns the width that prompts are padded to for their prefill."""
  return -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


@contextlib.contextmanager
def named(index: int) -> Iterator[None]:
  """Adds the index of the prompt to the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'prompt {index}: {error}') from error


def _row(output: Output, row: int, job: Job) -> Output:
  """Returns one row [1, ...], cut to the job's `max_new_tokens` columns."""
  # Copied, because a view would keep all rows alive.
  one = jax.tree.map(lambda x: x[row : row + 1].copy(), output)
  return decode.first_columns(one, job.max_new_tokens)


def _places(rows: Sequence[int], fresh: DecodeState) -> np.ndarray:
  """Returns the row that each row of `fresh` goes to; padding goes nowhere."""
  places = np.full(fresh.length.shape, np.iinfo(np.int32).max, np.int32)
  places[: len(rows)] = rows
  return places


@functools.partial(jax.jit, static_argnames='decoder')
def _empty(decoder, params, request) -> DecodeState:
  """Returns a state whose rows are all done."""
  state = initial.state(decoder, params, request)
  return dataclasses.replace(state, done=state.length > 0)


@functools.partial(jax.jit, donate_argnames=('state',))
def _replace(state: DecodeState, fresh: DecodeState, places: Any):
  """Writes the rows of `fresh` over the rows with the numbers in `places`."""
  write = lambda old, new: sharding.write_rows(old, places, new)
  return jax.tree.map(write, state, fresh)


@jax.jit
def _keep_rows(state: DecodeState, rows: Any) -> DecodeState:
  """Returns the state of the rows with these numbers."""
  return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)
