"""Rows that replace one another in a batch continue as if each were alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training_data import pool as pool_lib
import specsample
from specsample import StopReason
from specsample.testing import hash_model

_MODEL = hash_model.HashModel(vocab_size=16, seed=3)
_STOP = specsample.Stop(eos_ids=(7,), sequences=((1, 2),))
_SAMPLING = specsample.Sampling(min_p=0.01)
_MAX_LENGTH = 64
_RNG = np.random.default_rng(0)
# One prompt is exactly as long as the multiple that prompts are padded to.
_JOBS = [
  pool_lib.Job(
    number=100 + i,
    prompt=tuple(_RNG.integers(16, size=length).tolist()),
    temperature=(0.0, 0.5, 1.5)[i % 3],
    max_new_tokens=20 if i % 2 else 5,
  )
  for i, length in enumerate([3, 40, 1, 32, 7, 2, 33, 9, 40, 5, 6, 8, 31])
]


@functools.cache
def _alone(job):
  """Returns a job's tokens and stop reason from the library itself."""
  prompts, lengths = specsample.pad_prompts([job.prompt])
  output = specsample.generate(
    {'target': {}},
    prompts,
    lengths,
    jax.random.key(5),
    request_ids=np.asarray([job.number], np.int32),
    model=_MODEL,
    drafter=specsample.drafters.NoDraft(),
    verify=specsample.verify.chain,
    sampling=specsample.Sampling(temperature=job.temperature, min_p=0.01),
    max_new_tokens=job.max_new_tokens,
    max_length=_MAX_LENGTH,
    stop=_STOP,
  )
  length = int(output.lengths[0])
  tokens = np.asarray(output.tokens)[0, :length].tolist()
  return tokens, StopReason(int(output.stop_reason[0]))


def _run(jobs, *, then=lambda done: None, is_over=lambda _: False, **sizes):
  """Runs the jobs; returns the finished ones in the order of finishing."""
  finished = []

  def note(done):
    finished.append(done)
    return then(done)

  pool = pool_lib.Pool(
    target=specsample.Loaded(_MODEL, {}, None),
    sampling=_SAMPLING,
    stop=_STOP,
    max_length=_MAX_LENGTH,
    **sizes,
  )
  pool.run(jobs, jax.random.key(5), note, is_over)
  return finished


@pytest.mark.parametrize(
  'sizes',
  [
    {'batch_size': 4, 'group_size': 2, 'rounds': 3},
    {'batch_size': 4, 'group_size': 3, 'rounds': 8},
    {'batch_size': 20, 'group_size': 4, 'rounds': 1},
    # Buffers that grow with the rows, and a batch that shrinks at the end.
    {'batch_size': 8, 'group_size': 2, 'rounds': 3, 'slot_step': 16},
    {'batch_size': 8, 'rounds': 2, 'slot_step': 32, 'fewest_rows': 1},
  ],
)
def test_a_job_is_continued_as_if_alone(sizes):
  finished = _run(_JOBS, **sizes)
  assert len(finished) == len(_JOBS)
  found = {d.job.number: (d.tokens, d.stop_reason) for d in finished}
  assert found == {job.number: _alone(job) for job in _JOBS}
  assert {reason for _, reason in found.values()} == {
    StopReason.EOS,
    StopReason.SEQUENCE,
    StopReason.MAX_NEW_TOKENS,
  }


def test_the_targets_vectors_are_kept():
  for done in _run(_JOBS, batch_size=4, group_size=2):
    tokens = np.asarray([[*done.job.prompt, *done.tokens]])
    output, _ = _MODEL.apply({}, tokens, _MODEL.init_cache(1, 0))
    expected = output.hidden[0, :-1].astype(jnp.bfloat16)
    np.testing.assert_array_equal(done.hidden, expected)


def test_a_finished_job_may_be_followed_by_another():
  follow = lambda job: pool_lib.Job(job.number + 50, job.prompt[:5], 1.0, 9)
  finished = _run(
    _JOBS[:6],
    then=lambda done: follow(done.job) if done.job.number < 150 else None,
    batch_size=3,
    group_size=2,
  )
  found = {d.job.number: d.tokens for d in finished}
  assert len(finished) == len(found) == 12
  for job in _JOBS[:6]:
    assert found[job.number + 50] == _alone(follow(job))[0]


def test_a_follower_is_run_although_the_batch_has_shrunk():
  (first, *_) = _JOBS
  follower = pool_lib.Job(first.number + 50, first.prompt, 1.0, 9)
  finished = _run(
    [first],
    then=lambda done: follower if done.job is first else None,
    batch_size=8,
    fewest_rows=1,
    rounds=2,
  )
  assert [d.job for d in finished] == [first, follower]
  assert finished[1].tokens == _alone(follower)[0]


def test_a_job_that_is_over_ends_early_and_disturbs_no_other():
  limit = 4
  finished = _run(
    _JOBS,
    is_over=lambda tokens: len(tokens) >= limit,
    batch_size=4,
    group_size=2,
    rounds=2,
  )
  assert len(finished) == len(_JOBS)
  for done in finished:
    tokens, reason = _alone(done.job)
    if done.stop_reason == StopReason.RUNNING:
      assert limit <= len(done.tokens) < limit + 2
      assert done.tokens == tokens[: len(done.tokens)]
    else:
      assert (done.tokens, done.stop_reason) == (tokens, reason)
  assert any(done.stop_reason == StopReason.RUNNING for done in finished)


def test_without_jobs_there_is_nothing_to_do():
  assert _run([], batch_size=2) == []
