"""Many continuations at once: rows that end make room for the next prompts.

A batch of rows advances a few rounds at a time. Between them rows that are
done are read, and prompts of similar length are prefilled in small groups and
written over them, so that the batch stays full until the prompts run out.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments import recorder
import specsample
from specsample import sharding
from specsample.types import DecodeState

# Prompts are padded to a multiple of this: one executable each.
_WIDTH_MULTIPLE = 32


@dataclasses.dataclass(frozen=True)
class Job:
  """A prompt to be continued."""

  number: int  # selects the random stream, whatever else is in the batch
  prompt: tuple[int, ...]
  temperature: float
  max_new_tokens: int  # behind the prompt within the pool's `max_length`


@dataclasses.dataclass(frozen=True)
class Continuation:
  """What became of a job."""

  job: Job
  tokens: list[int]  # the stop counted in
  stop_reason: specsample.StopReason  # RUNNING where `is_over` ended it
  # [n, D] bfloat16, the target's last hidden vectors of prompt and tokens but
  # for the last token, which it was not given.
  hidden: np.ndarray


# A job that follows from a finished one, or None.
Then = Callable[[Continuation], Job | None]
# Whether a continuation, by its tokens so far, need not go on.
IsOver = Callable[[Sequence[int]], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  """How many rows there are, and of what size."""

  target: specsample.Loaded
  sampling: specsample.Sampling  # its temperature is each job's own
  stop: specsample.Stop
  max_length: int  # of a prompt and its continuation
  batch_size: int = 48
  group_size: int = 4  # prompts that are prefilled together
  rounds: int = 8  # between two looks at the rows

  def run(
    self, jobs: Iterable[Job], key: jax.Array, then: Then, is_over: IsOver
  ) -> None:
    """Continues all jobs, and those that `then` makes of finished ones.

    The order in which they finish depends on nothing but the arguments.
    """
    waiting = list(jobs)
    running: dict[int, Job] = {}
    state = self._empty(key)
    while waiting or running:
      free = [i for i in range(self.batch_size) if i not in running]
      while waiting and len(free) >= min(self.group_size, len(waiting)):
        group = _take(waiting, self.group_size)
        rows, free = free[: len(group)], free[len(group) :]
        running |= dict(zip(rows, group, strict=True))
        state = _replace(state, *self._prefill(group, rows, key))
      state = self._advance(state)
      shown = _Rows.of(state)
      for row, job in sorted(running.items()):
        tokens, reason = shown.continuation(row)
        if not reason and not is_over(tokens):
          continue
        del running[row]
        hidden = self._hidden(state, row, len(job.prompt) + len(tokens) - 1)
        following = then(Continuation(job, tokens, reason, hidden))
        if following is not None:
          waiting.append(following)

  @property
  def _drafter(self) -> recorder.Recorder:
    return recorder.Recorder(dim=self.target.model.dim)

  def _hidden(self, state: DecodeState, row: int, size: int) -> np.ndarray:
    # Cut on the host: of each length it would be a program of its own.
    return np.asarray(_row(state.draft.hidden, row))[:size]

  def _advance(self, state: DecodeState) -> DecodeState:
    return specsample.advance(
      {'target': self.target.params},
      state,
      model=self.target.model,
      drafter=self._drafter,
      verify=specsample.verify.chain,
      stop=self.stop,
      max_rounds=self.rounds,
    )

  def _empty(self, key: jax.Array) -> DecodeState:
    """Rows that are all done."""
    nothing = Job(0, (0,), 0.0, 1)
    state = self._state([nothing] * self.batch_size, key)
    return dataclasses.replace(state, done=state.length > 0)

  def _prefill(
    self, group: Sequence[Job], rows: Sequence[int], key: jax.Array
  ) -> tuple[DecodeState, np.ndarray]:
    """The group's state, and the row that each of its rows goes to."""
    missing = self.group_size - len(group)
    fresh = self._state([*group, *[group[-1]] * missing], key)
    # What fills up the group goes nowhere.
    goes_to = np.full(fresh.length.shape, np.iinfo(np.int32).max, np.int32)
    goes_to[: len(rows)] = rows
    return fresh, goes_to

  def _state(self, jobs: Sequence[Job], key: jax.Array) -> DecodeState:
    longest = max(len(job.prompt) for job in jobs)
    width = -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    prompts = np.zeros((len(jobs), width), np.int32)
    for prompt, job in zip(prompts, jobs, strict=True):
      prompt[: len(job.prompt)] = job.prompt
    state = specsample.prefill(
      {'target': self.target.params},
      prompts,
      np.asarray([len(job.prompt) for job in jobs], np.int32),
      key,
      request_ids=np.asarray([job.number for job in jobs], np.int32),
      model=self.target.model,
      drafter=self._drafter,
      sampling=dataclasses.replace(
        self.sampling,
        temperature=np.asarray([job.temperature for job in jobs], np.float32),
      ),
      max_new_tokens=self.max_length,
      max_length=self.max_length,
    )
    # Each row has a limit of its own, which is no other program.
    allowed = np.zeros(state.length.shape, np.int32)
    allowed[: len(jobs)] = [job.max_new_tokens for job in jobs]
    reason = jnp.full_like(
      state.limit_reason, specsample.StopReason.MAX_NEW_TOKENS
    )
    return dataclasses.replace(
      state, limit=state.prompt_length + allowed, limit_reason=reason
    )


def _take(waiting: list[Job], count: int) -> list[Job]:
  """Takes out the oldest job and those whose prompts are most like it long."""
  oldest = len(waiting[0].prompt)
  order = sorted(
    range(len(waiting)), key=lambda i: abs(len(waiting[i].prompt) - oldest)
  )
  chosen = sorted(order[:count])
  group = [waiting[i] for i in chosen]
  for i in reversed(chosen):
    del waiting[i]
  return group


@functools.partial(jax.jit, donate_argnames=('state',))
def _replace(state: DecodeState, fresh: DecodeState, rows) -> DecodeState:
  """Writes the rows of `fresh` over those of `state` with the numbers given.

  A number that is too large is no row.
  """
  write = lambda old, new: sharding.write_rows(old, rows, new)
  return jax.tree.map(write, state, fresh)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """What is read of a state, on the host."""

  tokens: np.ndarray
  prompt_length: np.ndarray
  length: np.ndarray
  stop_reason: np.ndarray

  @classmethod
  def of(cls, state: DecodeState) -> '_Rows':
    names = [field.name for field in dataclasses.fields(cls)]
    arrays = _replicate({name: getattr(state, name) for name in names})
    return cls(**jax.device_get(arrays))

  def continuation(self, row: int) -> tuple[list[int], specsample.StopReason]:
    begin, end = self.prompt_length[row], self.length[row]
    reason = specsample.StopReason(int(self.stop_reason[row]))
    return self.tokens[row, begin:end].tolist(), reason


@jax.jit
def _row(x, row):
  whole = sharding.constrain(x, *[None] * x.ndim)
  return jax.lax.dynamic_index_in_dim(whole, row, keepdims=False)


# On several hosts each gets all of it.
_replicate = jax.jit(sharding.replicate)
