"""Which examples a step learns from while data are appended."""

import collections
import itertools

import numpy as np
import pytest

from experiments.training_data import schedule as schedule_lib

_BATCH_SIZE = 4
_LENGTHS = np.random.default_rng(0).integers(5, 50, size=1000)


def _schedule(*phases, seed=0):
  return schedule_lib.Schedule(
    lengths=_LENGTHS[: phases[-1][1]],
    phases=[schedule_lib.Phase(*phase) for phase in phases],
    batch_size=_BATCH_SIZE,
    seed=seed,
  )


def _steps(schedule, first, last):
  return [schedule[i].tolist() for i in range(first, last)]


def _counts(schedule, first, last):
  steps = _steps(schedule, first, last)
  return collections.Counter(itertools.chain.from_iterable(steps))


@pytest.mark.parametrize('boundary', [0, 1, 7, 25, 26, 60])
def test_steps_before_a_boundary_stay_as_they_were(boundary):
  alone = _schedule((0, 101))
  grown = _schedule((0, 101), (boundary, 140))
  again = _schedule((0, 101), (boundary, 140), (boundary + 30, 300))
  assert _steps(grown, 0, boundary) == _steps(alone, 0, boundary)
  assert _steps(again, 0, boundary + 30) == _steps(grown, 0, boundary + 30)
  assert max(_counts(grown, boundary, boundary + 12)) >= 101


@pytest.mark.parametrize('boundary', [0, 1, 7, 25, 26, 60])
@pytest.mark.parametrize('second', [0, 3, 40])
def test_examples_are_seen_equally_often(boundary, second):
  """Counts within a phase differ by at most one from its start on."""
  phases = [(0, 101), (boundary, 140), (boundary + second, 161)]
  schedule = _schedule(*phases)
  starts = [0, 101, 140, 161]
  for last in (boundary + second, boundary + second + 17, 400):
    counts = _counts(schedule, 0, last)
    for i, (first, _) in enumerate(phases):
      own = [counts[x] for x in range(*starts[i : i + 2])]
      if last > first:
        assert max(own) - min(own) <= 1
  # Nothing is left out of an epoch that was interrupted twice.
  assert min(counts[x] for x in range(161)) > 0


def test_a_phase_begins_with_what_is_unseen():
  schedule = _schedule((0, 40), (4, 60))
  seen = set(_counts(schedule, 0, 4))
  opening = _counts(schedule, 4, 4 + 11)  # 24 that are left and 20 new ones
  assert set(opening) == set(range(60)) - seen
  assert set(opening.values()) == {1}
  assert _counts(schedule, 15, 30) == collections.Counter(range(60))


def test_epochs_and_seeds_differ_in_their_order():
  schedule = _schedule((0, 40))
  assert _steps(schedule, 0, 10) != _steps(schedule, 10, 20)
  assert _steps(schedule, 0, 10) != _steps(_schedule((0, 40), seed=1), 0, 10)


def test_a_batch_holds_examples_of_similar_length():
  schedule = _schedule((0, 1000))
  spread = [np.ptp(_LENGTHS[schedule[i]]) for i in range(250)]
  assert np.mean(spread) < 3
