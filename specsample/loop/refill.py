"""A batch whose rows are refilled between compiled runs of rounds.

Rows that are done are read, and the next prompts are prefilled by themselves
and written over them (Yu et al., Orca, OSDI 2022).

By default everything has one shape: one executable of the loop, one to write
rows, and at most four of the prefill, one for each chunk size. A batch may also
follow its rows: its buffers grow with the longest row, so that attention reads
no more than that, and once no prompts wait it has fewer rows. Each size is
compiled.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import sharding
from specsample.loop import decode
from specsample.loop import initial
from specsample.loop import request as request_lib
from specsample.loop.stopping import Stop
from specsample.sampling import Sampling
from specsample.types import (
  Array,
  DecodeState,
  Drafter,
  Model,
  Output,
  Params,
  StopReason,
  Verifier,
)

# Few sizes of short prompts, each an executable of its prefill in one pass.
_WIDTH_MULTIPLE = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
  """A prompt to be continued."""

  index: int  # what the caller calls it
  prompt: Sequence[int] | np.ndarray
  request_id: int
  sampling: Sampling  # scalars, of the same settings in all jobs
  max_new_tokens: int


@dataclasses.dataclass(frozen=True, eq=False)
class Finished:
  """A job that is done, or not gone on with."""

  job: Job
  output: Output  # [1, ...], on the host; RUNNING where `is_over` ended it
  state: DecodeState  # of the batch: used up when the next job is asked for
  row: int  # the job's, in the state


# The next jobs, at most so many; none where none is waiting now.
Take = Callable[[int], Sequence[Job]]
# Whether a continuation, by its tokens so far, need not go on.
IsOver = Callable[[Sequence[int]], bool]
# The parameters to go on with, of the same shapes, once a job is finished.
Learn = Callable[[Params, Finished], Params]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """Rows that jobs take turns in, for callers that make jobs as they go."""

  model: Model
  drafter: Drafter
  verify: Verifier
  stop: Stop = Stop()
  batch_size: int
  max_length: int  # of a prompt and its continuation
  max_new_tokens: int  # the most of any job
  group_size: int = 1  # rows that are refilled at once
  rounds: int | None = None  # at most, between two looks at the rows
  # Buffers have a multiple of this many slots, the smallest that holds the rows
  # until the next look (so `rounds` must be set). None: room for `max_length`.
  slot_step: int | None = None
  # Once no jobs wait, the batch is halved down to this many rows as rows end.
  # None: it stays as it is.
  fewest_rows: int | None = None

  def __post_init__(self):
    """Refuses sizes below 1, and slots that nobody would look after."""
    for name in ('batch_size', 'group_size'):
      request_lib.counts(name, getattr(self, name), 1)
    for name in ('rounds', 'slot_step', 'fewest_rows'):
      if getattr(self, name) is not None:
        request_lib.counts(name, getattr(self, name), 1)
    if self.slot_step is not None and self.rounds is None:
      raise ValueError(
        f'slot_step is {self.slot_step} and rounds None: set rounds, so that '
        'buffers can grow before a row fills them'
      )

  def check(self, params: Params, key: Array, jobs: Sequence[Job]) -> None:
    """Refuses what `decode.generate` would, and a prompt by its job's index.

    Raises:
      ValueError: what does not fit, and the remedy.
    """
    capacity = min(self.max_length, self.model.max_length)
    for job in jobs:
      with named(job.index):
        row = np.asarray(job.prompt)[None]
        lengths = np.asarray([row.size])
        request_lib.check_prompts(row, lengths, capacity, self.model)
    decode.check_rule(
      params,
      self._request(params, key, jobs[0].sampling),
      model=self.model,
      drafter=self.drafter,
      verify=self.verify,
    )

  def run(
    self,
    params: Params,
    key: Array,
    take: Take,
    is_over: IsOver = lambda tokens: False,
    learn: Learn = lambda params, done: params,
  ) -> Iterator[Finished]:
    """Continues jobs until none is left, yielding each when it is done.

    The order follows from the arguments alone. `take` is asked again after jobs
    were yielded, and may have got new ones from them.
    """
    running: dict[int, Job] = {}
    lengths: dict[int, int] = {}  # of the running rows, prompts included
    num_rows = self.batch_size
    state, sizes = None, _Sizes({})
    while True:
      free = [row for row in range(num_rows) if row not in running]
      while len(free) >= self._group and (jobs := take(self._group)):
        if state is None:
          sizes = self._sizes(params, key, jobs[0].sampling)
          request = self._request(params, key, jobs[0].sampling, sizes.first)
          state = _empty(
            params, request, model=self.model, drafter=self.drafter
          )
        rows, free = free[: len(jobs)], free[len(jobs) :]
        running |= dict(zip(rows, jobs, strict=True))
        lengths |= {row: len(running[row].prompt) for row in rows}
        fresh = self._prefill(params, key, jobs, sizes)
        state = sizes.grown(state, fresh.tokens.shape[1])
        state = _replace(state, fresh, _places(rows, fresh))
      if state is None or not running:
        return
      if len(free) >= self._group:  # no job waits
        kept = self._fewer_rows(num_rows, running)
        if len(kept) < num_rows:
          state = _keep_rows(state, np.asarray(kept, np.int32))
          running = {kept.index(row): job for row, job in running.items()}
          lengths = {kept.index(row): size for row, size in lengths.items()}
          num_rows = len(kept)
          free = [row for row in range(num_rows) if row not in running]
      state = sizes.grown(state, self._after_rounds(max(lengths.values())))
      state = self._advance(params, state, max(1, self._group - len(free)))
      output = jax.device_get(
        decode.finish(state, max_new_tokens=self.max_new_tokens)
      )
      for row, job in sorted(running.items()):
        length = output.lengths[row]
        lengths[row] = len(job.prompt) + int(length)
        done = output.stop_reason[row] != StopReason.RUNNING
        if done or is_over(output.tokens[row, :length].tolist()):
          del running[row], lengths[row]
          done_now = Finished(job, _row(output, row, job), state, row)
          params = learn(params, done_now)
          yield done_now

  @property
  def _group(self) -> int:
    return min(self.group_size, self.batch_size)

  def _after_rounds(self, length: int) -> int:
    """Slots that a row of this length may need until the next look."""
    tokens = self.drafter.num_draft_tokens + 1
    rounds = self.max_length if self.rounds is None else self.rounds
    return length + tokens * (rounds + 1)

  def _sizes(self, params, key, sampling) -> '_Sizes':
    shapes = lambda slots: jax.eval_shape(
      functools.partial(initial.state, model=self.model, drafter=self.drafter),
      params,
      self._request(params, key, sampling, slots),
    )
    largest = shapes(None)
    last = largest.tokens.shape[1]
    sizes = range(self.slot_step or last, last, self.slot_step or last)
    # The ring of a window is a buffer of another kind than one that grows.
    like = jax.tree.structure(largest)
    found = {size: shapes(size) for size in sizes} | {last: largest}
    return _Sizes(
      {k: v for k, v in found.items() if jax.tree.structure(v) in (like,)}
    )

  def _fewer_rows(self, num_rows: int, running: dict[int, Job]) -> list[int]:
    """The rows to go on with: all, or those running and some to fill up."""
    # Rows of a mesh stay where they are.
    fewest = None if sharding.batch_parts() > 1 else self.fewest_rows
    wanted = max(len(running), num_rows if fewest is None else fewest)
    while num_rows >= 2 * wanted:
      num_rows //= 2
    others = [row for row in range(self.batch_size) if row not in running]
    return sorted(running) + others[: num_rows - len(running)]

  def _request(self, params, key, sampling, slots=None) -> request_lib.Request:
    """Of rows that are to be written over."""
    return request_lib.check(
      params,
      np.zeros((self.batch_size, 1), np.int32),
      np.ones(self.batch_size, np.int32),
      key,
      None,
      model=self.model,
      drafter=self.drafter,
      sampling=sampling,
      max_new_tokens=1,
      max_length=self.max_length,
      slots=slots,
    )

  def _prefill(self, params, key, jobs, sizes: '_Sizes') -> DecodeState:
    # One shape for groups of any size.
    jobs = [*jobs, *[jobs[-1]] * (self._group - len(jobs))]
    longest = max(len(job.prompt) for job in jobs)
    prompts = np.zeros((len(jobs), width(longest)), np.int32)
    for prompt, job in zip(prompts, jobs, strict=True):
      prompt[: len(job.prompt)] = job.prompt
    stack = lambda *values: np.stack(values)
    chunk = min(request_lib.PREFILL_CHUNK, prompts.shape[1])
    fed = -(-longest // chunk) * chunk + self.drafter.num_draft_tokens + 1
    return decode.prefill(
      params,
      prompts,
      np.asarray([len(job.prompt) for job in jobs], np.int32),
      key,
      request_ids=np.asarray([job.request_id for job in jobs], np.int32),
      model=self.model,
      drafter=self.drafter,
      sampling=jax.tree.map(stack, *[job.sampling for job in jobs]),
      max_new_tokens=np.asarray([job.max_new_tokens for job in jobs]),
      max_length=self.max_length,
      slots=sizes.holding_doubled(fed),
    )

  def _advance(self, params, state, max_finished) -> DecodeState:
    # A round of a row that is not done emits a token.
    rounds = self.max_length if self.rounds is None else self.rounds
    return decode.advance(
      params,
      state,
      model=self.model,
      drafter=self.drafter,
      verify=self.verify,
      stop=self.stop,
      max_rounds=np.int32(rounds),
      max_finished=np.int32(max_finished),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Sizes:
  """The numbers of slots that a state may have, and its shapes for each."""

  shapes: dict[int, Any]  # by the slots, ascending: a state of shapes

  @property
  def first(self) -> int:
    """The fewest slots."""
    return next(iter(self.shapes))

  def holding(self, length: int) -> int:
    """The fewest slots that hold a row of this length, or the most."""
    return next((x for x in self.shapes if x >= length), max(self.shapes))

  def holding_doubled(self, length: int) -> int:
    """As `holding`, among few sizes: powers of two times the first."""
    size = self.first
    while size < length:
      size *= 2
    return self.holding(size)

  def grown(self, state: DecodeState, length: int) -> DecodeState:
    """The state with slots for rows of this length, or as it is."""
    size = self.holding(length)
    if size <= state.tokens.shape[1]:
      return state
    leaves = jax.tree.leaves(self.shapes[size])
    batch = state.length.shape
    return _resize(state, shapes=tuple(batch + x.shape[1:] for x in leaves))


def width(longest: int) -> int:
  """What prompts are padded to for their prefill, by the longest of them."""
  return -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


@contextlib.contextmanager
def named(index: int) -> Iterator[None]:
  """Says of which prompt an error is."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'prompt {index}: {error}') from error


def _row(output: Output, row: int, job: Job) -> Output:
  """A row, [1, ...], with as many columns as the job may have tokens."""
  # Copied: a view would keep all rows.
  one = jax.tree.map(lambda x: x[row : row + 1].copy(), output)
  cut = lambda x: x[:, : job.max_new_tokens]
  return dataclasses.replace(
    one,
    tokens=cut(one.tokens),
    log_probs=cut(one.log_probs),
    origin=cut(one.origin),
    emit_round=cut(one.emit_round),
  )


def _places(rows: Sequence[int], fresh: DecodeState) -> np.ndarray:
  """The row that each of `fresh` goes to; what fills it up goes nowhere."""
  places = np.full(fresh.length.shape, np.iinfo(np.int32).max, np.int32)
  places[: len(rows)] = rows
  return places


@functools.partial(jax.jit, static_argnames=('model', 'drafter'))
def _empty(params, request, *, model, drafter) -> DecodeState:
  """Rows that are all done."""
  state = initial.state(params, request, model=model, drafter=drafter)
  return dataclasses.replace(state, done=state.length > 0)


@functools.partial(jax.jit, donate_argnames=('state',))
def _replace(state: DecodeState, fresh: DecodeState, places: Any):
  """Writes the rows of `fresh` over those with the numbers given.

  Slots that `fresh` has not are 0: a row reads none that it has not written.
  """
  fit = lambda old, new: _fit(new, new.shape[:1] + old.shape[1:])
  write = lambda old, new: sharding.write_rows(old, places, fit(old, new))
  return jax.tree.map(write, state, fresh)


@functools.partial(jax.jit, static_argnames=('shapes',))
def _resize(state: DecodeState, *, shapes: tuple) -> DecodeState:
  """The state with leaves of these shapes."""
  leaves, structure = jax.tree.flatten(state)
  resized = [_fit(x, shape) for x, shape in zip(leaves, shapes, strict=True)]
  return jax.tree.unflatten(structure, resized)


def _fit(x: Array, shape: tuple[int, ...]) -> Array:
  """x with zeros added at the end of its axes, up to `shape`."""
  if x.shape == shape:
    return x
  return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


@jax.jit
def _keep_rows(state: DecodeState, rows: Any) -> DecodeState:
  """The state of the rows with these numbers."""
  return jax.tree.map(lambda x: jnp.take(x, rows, axis=0), state)
