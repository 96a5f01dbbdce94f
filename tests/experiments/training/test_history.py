"""Which state a training run resumes from, and which states it keeps."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import history as history_lib
from experiments.training import train_state
from experiments.training import training
from specsample.training import step as step_lib

_PLAN = training.Plan(40, 50)  # of 50 steps, a fifth of them decay
_LENGTHS = {'unit': 10, 'decay': 0.2}


def _state(step):
  return step_lib.TrainState(
    step=jnp.int32(step),
    trained={'kernel': jnp.full((4, 4), float(step))},
    optimizer=(jnp.zeros(3),),
  )


@pytest.fixture
def run(tmp_path):
  """The checkpoints of a finished run, with tokens per round by step."""
  checkpoints = train_state.Checkpoints(tmp_path)
  found = history_lib.History(run='a', plan=_PLAN)
  for step, value in [(10, 1.5), (20, 1.6), (30, 1.4), (40, 1.6), (50, 1.7)]:
    found.train.append({'step': step, 'answer_tokens': 7})
    found.held_out.append({'step': step, 'tokens_per_round': value})
    checkpoints.save(_state(step), dataclasses.asdict(found), found.kept())
  return checkpoints


def _resume(checkpoints, steps, run='a'):
  return history_lib.resume(checkpoints, run, steps=steps, **_LENGTHS)


def test_without_a_checkpoint_it_begins(tmp_path):
  step, found = _resume(train_state.Checkpoints(tmp_path), 50)
  assert (step, found) == (0, history_lib.History(run='a', plan=_PLAN))


def test_the_best_is_kept_and_what_a_longer_run_needs(run):
  # The best, the best before the decay, its start, and the last two.
  assert run.steps == [20, 40, 50]
  step, found = _resume(run, 50)
  assert (step, found.best['step']) == (50, 50)
  assert found.seen() == {10: 7, 20: 14, 30: 21, 40: 28, 50: 35}
  np.testing.assert_array_equal(
    run.restore(_state(0), 20).trained['kernel'], 20.0
  )


def test_a_decay_is_left_for_a_longer_run(run):
  step, found = _resume(run, 100)
  assert (step, found.plan) == (40, training.Plan(80, 100))
  assert [x['step'] for x in found.held_out] == [10, 20, 30, 40]
  assert found.best['step'] == 20
  # A shorter run has taken these steps already.
  assert _resume(run, 10)[0] == 50
  run.drop_after(step)
  assert run.steps == [20, 40]
  run.save(_state(60), dataclasses.asdict(found), found.kept())
  assert _resume(run, 100)[0] == 60


def test_the_checkpoint_of_another_run_is_refused(run):
  with pytest.raises(ValueError, match='step 50 belongs to another run: del'):
    _resume(run, 50, run='b')
