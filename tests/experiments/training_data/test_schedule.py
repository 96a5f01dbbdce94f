"""Which examples a step learns from."""

import numpy as np

from experiments.training_data import schedule as schedule_lib

_BATCH_SIZE = 4
_LENGTHS = np.random.default_rng(0).integers(5, 50, size=1000)


def _schedule(num_examples, seed=0):
  return schedule_lib.Schedule(
    lengths=_LENGTHS[:num_examples], batch_size=_BATCH_SIZE, seed=seed
  )


def _steps(schedule, first, last):
  return [schedule[i].tolist() for i in range(first, last)]


def test_an_epoch_has_every_example_once():
  schedule = _schedule(101)
  for first in (0, 26, 260):
    epoch = np.concatenate([schedule[i] for i in range(first, first + 26)])
    assert sorted(epoch) == list(range(101))


def test_a_step_depends_on_its_number_alone():
  in_order = _steps(_schedule(101), 0, 60)
  schedule = _schedule(101)
  assert [schedule[i].tolist() for i in reversed(range(60))] == in_order[::-1]


def test_epochs_and_seeds_differ_in_their_order():
  schedule = _schedule(40)
  assert _steps(schedule, 0, 10) != _steps(schedule, 10, 20)
  assert _steps(schedule, 0, 10) != _steps(_schedule(40, seed=1), 0, 10)


def test_a_batch_holds_examples_of_similar_length():
  schedule = _schedule(1000)
  spread = [np.ptp(_LENGTHS[schedule[i]]) for i in range(250)]
  assert np.mean(spread) < 3
