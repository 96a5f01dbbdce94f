"""Batched continuation of many prompts; finished rows take the next ones.

Like `specsample.generate_all`, except that a finished continuation may lead to
another prompt, prompts of similar length are prefilled together, and the
target's hidden vectors are kept.
"""

from collections.abc import Callable, Iterable
import dataclasses
import heapq

import jax
import jax.numpy as jnp
import numpy as np

import specsample
from specsample import drafters
from specsample import sharding
from specsample import types
from specsample.loop import refill
from specsample.loop.decoder import Decoder
from specsample.models import cache as cache_lib
from specsample.types import Array


@types.pytree
class Recorded:
  """The target's final hidden vectors of the tokens before the pending one."""

  hidden: Array  # [B, S, D] bfloat16
  length: Array  # [B] int32, the number of recorded vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(drafters.NoDraft):
  """Never drafts, and records the target's hidden vectors [dim]."""

  dim: int

  def init(self, params, batch_size, max_length):
    del params
    return Recorded(
      hidden=sharding.zeros(
        (batch_size, max_length, self.dim), jnp.bfloat16, 'batch', None, None
      ),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `types.Drafter`: keeps the vectors of the tokens that stay."""
    del params, tokens, verdict
    hidden = output.hidden.astype(state.hidden.dtype)
    written = cache_lib.write(state.hidden, hidden, state.length)
    return Recorded(hidden=written, length=state.length + count)


@dataclasses.dataclass(frozen=True)
class Job:
  """A prompt to be continued."""

  number: int  # selects the random stream, independently of the batch
  prompt: tuple[int, ...]
  temperature: float
  max_new_tokens: int  # with the prompt at most the pool's `max_length`


@dataclasses.dataclass(frozen=True)
class Continuation:
  """The result of a job."""

  job: Job
  tokens: list[int]  # including the stop token or sequence
  stop_reason: specsample.StopReason  # RUNNING if `is_over` ended it
  # [n, D] bfloat16, the target's final hidden vectors of prompt and tokens,
  # except for the last token, which the target has not read.
  hidden: np.ndarray


# Returns the job that follows from a finished one, or None.
Then = Callable[[Continuation], Job | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  """A batch of rows that jobs take turns in."""

  target: specsample.Loaded
  sampling: specsample.Sampling  # each job sets its own temperature
  stop: specsample.Stop
  max_length: int  # of a prompt with its continuation
  batch_size: int = 64
  group_size: int = 4  # prompts that are prefilled together
  rounds: int = 8  # at most, between two checks of the rows
  slot_step: int = 128  # buffers grow in steps of this many slots
  fewest_rows: int = 16  # the batch shrinks down to this once no jobs wait

  def run(
    self,
    jobs: Iterable[Job],
    key: jax.Array,
    then: Then,
    is_over: refill.IsOver,
  ) -> int:
    """Runs all jobs, and those that `then` returns for finished ones.

    The order in which they finish depends on the arguments alone.

    Returns:
      The number of tokens that the target read or wrote, prompts included.
    """
    num_tokens = 0
    taken: dict[int, Job] = {}
    # Shortest first: prompts that are prefilled together then have similar
    # lengths, and the buffers stay small until long prompts need them.
    waiting = [(len(job.prompt), job.number, job) for job in jobs]
    heapq.heapify(waiting)

    def take(count):
      count = min(count, len(waiting))
      group = [heapq.heappop(waiting)[-1] for _ in range(count)]
      taken.update({job.number: job for job in group})
      return [self._request(job) for job in group]

    batch = refill.Batch(
      decoder=Decoder(
        self.target.model,
        Recorder(dim=self.target.model.dim),
        specsample.verify.chain,
      ),
      stop=self.stop,
      batch_size=self.batch_size,
      max_length=self.max_length,
      max_new_tokens=self.max_length,
      group_size=self.group_size,
      rounds=self.rounds,
      slot_step=self.slot_step,
      fewest_rows=self.fewest_rows,
    )
    params = {'target': self.target.params}
    for done in batch.run(params, key, take, is_over):
      job, output = taken.pop(done.job.index), done.output
      tokens = output.tokens[0, : output.lengths[0]].tolist()
      # Cut on the host: each length would need a program of its own.
      hidden = np.asarray(_row(done.state.draft.hidden, done.row))
      num_tokens += len(job.prompt) + len(tokens)
      continuation = Continuation(
        job=job,
        tokens=tokens,
        stop_reason=specsample.StopReason(int(output.stop_reason[0])),
        hidden=hidden[: len(job.prompt) + len(tokens) - 1],
      )
      following = then(continuation)
      if following is not None:
        entry = (len(following.prompt), following.number, following)
        heapq.heappush(waiting, entry)
    return num_tokens

  def _request(self, job: Job) -> refill.Job:
    return refill.Job(
      index=job.number,
      prompt=job.prompt,
      request_id=job.number,
      sampling=dataclasses.replace(
        self.sampling, temperature=np.asarray(job.temperature, np.float32)
      ),
      max_new_tokens=job.max_new_tokens,
    )


@jax.jit
def _row(x, row):
  whole = sharding.constrain(x, *[None] * x.ndim)
  return jax.lax.dynamic_index_in_dim(whole, row, keepdims=False)
