"""Which states a training run resumes from, and which is the best."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command import journal
from experiments.training import checkpoints as checkpoints_lib
from experiments.training import plan as plan_lib
from experiments.training import records as records_lib
from specsample import files
from specsample.training import step as step_lib

_PLAN = plan_lib.Plan(40, 50)
_LONGER = plan_lib.Plan(80, 90)


def _state(step):
  return step_lib.TrainState(
    step=jnp.int32(step),
    trained={'kernel': jnp.full((4, 4), float(step))},
    optimizer=(jnp.zeros(3),),
  )


@pytest.fixture
def run(tmp_path):
  """The records and checkpoints of a run in a folder."""
  out = files.at(tmp_path)
  records = records_lib.Records(journal.Journal(out, {}))
  return records, checkpoints_lib.RunCheckpoints(out, records)


def _report(records, step, plan=_PLAN):
  records.add(plan, records_lib.TRAIN, step, {'step': step})


def _evaluate(records, step, tokens_per_round, plan=_PLAN):
  values = {'step': step, 'tokens_per_round': tokens_per_round}
  records.add(plan, records_lib.HELD_OUT, step, values)


def test_a_decay_is_left_for_a_longer_run(run, tmp_path):
  records, checkpoints = run
  assert checkpoints.step(_PLAN) == 0
  assert checkpoints.restore(_state(0), _PLAN) is None
  for step in (30, 40, 45):
    _report(records, step)
    checkpoints.save(_state(step), _PLAN)
  assert records.taken == 40
  assert checkpoints.step(_PLAN) == 45
  assert checkpoints.step(_LONGER) == 40
  found = checkpoints.restore(_state(0), _LONGER)
  np.testing.assert_array_equal(found.trained['kernel'], 40.0)
  checkpoints.forget_other_decays(_PLAN)
  assert checkpoints.step(_PLAN) == 45
  checkpoints.forget_other_decays(_LONGER)
  assert not list((tmp_path / 'decay').iterdir())


def test_the_best_weights_are_those_that_are_journalled(run):
  records, checkpoints = run
  checkpoints.save_best(_state(10), _PLAN)  # then it is killed
  assert checkpoints.best(_PLAN) is None
  with pytest.raises(ValueError, match='hold no weights that the journal'):
    checkpoints.restore_best(_state(0), _PLAN)
  checkpoints.save_best(_state(10), _PLAN)
  _evaluate(records, 10, 1.5)
  _evaluate(records, 20, 1.4)  # its weights were not kept
  checkpoints.save_best(_state(30), _PLAN)
  assert checkpoints.best(_PLAN)['step'] == 10
  _evaluate(records, 30, 1.6)
  assert checkpoints.best(_PLAN)['step'] == 30
  checkpoints.save_best(_state(45), _PLAN)
  _evaluate(records, 45, 1.7)
  assert checkpoints.best(_PLAN)['step'] == 45
  found = checkpoints.restore_best(_state(0), _PLAN)
  np.testing.assert_array_equal(found.trained['kernel'], 45.0)
  # The decay is not part of a longer run.
  assert checkpoints.best(_LONGER)['step'] == 30
  assert [x['step'] for x in records.curve(_LONGER, 'held out')] == [10, 20, 30]
  assert [x['step'] for x in records.curve(_PLAN, 'held out')] == [
    *(10, 20, 30, 45)
  ]


def test_a_step_that_is_not_journalled_is_refused(run):
  _, checkpoints = run
  checkpoints.save(_state(30), _PLAN)
  with pytest.raises(
    ValueError, match='step 30 belongs to a run that the jour'
  ):
    checkpoints.step(_PLAN)


def test_patience_counts_from_the_last_new_data(run):
  records, _ = run
  for step, value in [(10, 1.5), (20, 1.4), (30, 1.6), (40, 1.6), (50, 1.5)]:
    _evaluate(records, step, value, _LONGER)
  assert records.stop(None) is None
  assert records.stop(1) == 20
  assert records.stop(2) == 50
  assert records.stop(3) is None
