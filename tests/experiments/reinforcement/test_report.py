"""Speeds and rewards of arms, from records that are made up."""

import dataclasses

import numpy as np
import pytest

from experiments import methods
from experiments.command import journal as journal_lib
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import reinforcement
from experiments.reinforcement import report
from experiments.reinforcement import rewarded
import specsample
from specsample import drafters
from specsample import verify


@pytest.fixture(scope='module')
def settings(checkpoint):
  """Two epochs of two steps; arms of 4 and of 16 rows."""
  arm = lambda drafter, num_rows: arm_lib.Arm(
    method=methods.Method(drafter, verify.coupled), num_rows=num_rows
  )
  ngram, none = drafters.Ngram(num_draft_tokens=2), drafters.NoDraft()
  return reinforcement.Reinforcement(
    target=specsample.load(checkpoint),
    arms={
      'ngram': arm(ngram, 16),
      'plain 4': arm(none, 4),
      'chosen': arm(none, 16),
      'plain 16': arm(none, 16),
      'alone': arm(ngram, 2),
    },
    largest=3,
    train=4,
    held_out=1,
    prompts=2,
    steps=4,
  )


def _record(seconds, tail_seconds=1.0, reward=0.5, tokens=60, digest='a'):
  return {
    'reward': reward,
    'tokens': tokens,
    'rounds': 40,
    'kept': 20,
    'judged': 40,
    'seconds': seconds,
    'tail_seconds': tail_seconds,
    'digest': digest,
  }


def _journal(folder, ngram, plain):
  """Returns the journal of a run that was resumed at its third step."""
  journal = journal_lib.Journal(folder, {})
  for i in range(4):
    arms = {'ngram': ngram[i], 'plain 16': plain[i]}
    arms |= dict.fromkeys(('plain 4', 'chosen', 'alone'), _record(100.0))
    step = {'arms': arms, 'begins': i == 2, 'updates': [], 'drafter': {}}
    journal.add(('step', i), step)
  journal.add(('held out', 0), {'steps': 0, 'answers': 1, 'reward': 0.0})
  return journal


@pytest.fixture
def found(settings, tmp_path):
  ngram = [_record(9), _record(9), _record(9), _record(2, 1, 0.75, 30, 'b')]
  plain = [_record(1), _record(1), _record(1), _record(6, 5)]
  return report.Found.of(settings, _journal(tmp_path, ngram, plain))


def test_speeds_leave_out_the_first_epoch_and_first_steps(found):
  arms = {arm.arm: arm for arm in found.arms}
  ngram = arms['ngram']
  assert ngram.timed_steps == 1
  assert ngram.tokens_per_s == pytest.approx(30 / 2)
  # By the time per token: 30 tokens in 2 s, against 60 in 6 s.
  assert ngram.speedup == pytest.approx(1.5)
  assert ngram.tail_speedup == pytest.approx(5 / 60 * 30)
  assert ngram.speedup_ci95 is None  # from one step


def test_an_arm_is_compared_with_the_plain_one_of_as_many_rows(found):
  plain = {arm.arm: arm.plain for arm in found.arms}
  assert plain == {
    'ngram': 'plain 16',
    'plain 4': None,
    'chosen': 'plain 16',  # as `auto` may choose
    'plain 16': None,
    'alone': None,
  }
  for arm in found.arms:
    assert (arm.speedup is None) == (arm.plain is None)


def test_rewards_and_tokens_are_of_all_steps(found):
  ngram, *_ = found.arms
  assert ngram.reward == pytest.approx((3 * 0.5 + 0.75) / 4)
  assert ngram.reward_difference == pytest.approx(0.25 / 4)
  assert ngram.reward_difference_ci95[0] < 0.25 / 4
  assert ngram.same_tokens == 3
  *_, last = found.rows
  assert last.steps == [4, 4]
  assert last.reward == 0.75
  assert last.acceptance == 0.5
  assert last.tokens_per_round == 30 / 40
  assert last.loss is None


def test_what_differs_is_said(found, capsys, tmp_path):
  report.show(tmp_path, found)
  out = capsys.readouterr().out
  assert (
    'ngram and plain 16: the same tokens in 3 of 4 steps, a reward that '
    'differs by +0.062'
  ) in ' '.join(out.split())
  assert 'where rounding decides' in out


def test_the_tail_begins_when_four_answers_are_missing():
  seconds = np.asarray([[1.0, 9.0, 2.0], [4.0, 8.0, 3.0]])
  rollouts = specsample.Rollouts(
    prompts=np.zeros((2, 1), np.int32),
    prompt_lengths=np.ones(2, np.int32),
    tokens=np.zeros((2, 3, 2), np.int32),
    lengths=np.full((2, 3), 2),
    warped_log_probs=np.zeros((2, 3, 2)),
    model_log_probs=np.zeros((2, 3, 2)),
    stop_reason=np.zeros((2, 3), np.int32),
    rounds=np.full((2, 3), 2),
    proposed=np.zeros((2, 3, 1), np.int32),
    accepted=np.zeros((2, 3, 1), np.int32),
    seconds=seconds,
    lossless=True,
  )
  of = rewarded.Rewarded(rollouts, np.eye(2, 3), 9.5)
  record = of.record()
  assert record['tail_seconds'] == 9 - 2
  assert record['seconds'] == 9.5
  assert record['reward'] == pytest.approx(1 / 3)
  # With four answers, all of the call is the tail.
  few = dataclasses.replace(rollouts, seconds=seconds[:, :2])
  assert dataclasses.replace(of, rollouts=few).record()['tail_seconds'] == 9
