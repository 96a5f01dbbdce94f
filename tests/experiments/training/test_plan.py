"""The learning rate's schedule, and the length of a run."""

import numpy as np
import pytest

from experiments.training import plan as plan_lib


def _plan(steps, taken=0, stop=None, unit=10):
  return plan_lib.Plan.of(
    steps=steps, unit=unit, decay=0.1, taken=taken, stop=stop
  )


def test_the_rate_rises_stays_and_falls():
  plan = _plan(1000)
  assert plan == plan_lib.Plan(900, 1000)
  rates = [plan.scale(i, warmup=4) for i in range(1000)]
  assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
  assert set(rates[4:900]) == {1.0}
  assert np.all(np.diff(rates[899:]) < 0)
  assert 0 < rates[-1] < 0.01
  # The rate has halved after a quarter of the decay.
  assert rates[925] == pytest.approx(0.5, abs=0.01)


def test_a_rate_may_begin_later():
  plan = _plan(1000)
  assert [plan.scale(i, 2, first=50) for i in (0, 49, 50, 51, 52)] == [
    *(0.0, 0.0, 0.5, 1.0, 1.0)
  ]
  assert plan.scale(0, warmup=0) == 1.0


def test_up_to_the_decay_a_longer_run_has_the_same_rates():
  short, long = _plan(1000), _plan(5000)
  for step in range(short.decay_start):
    assert short.scale(step, 100) == long.scale(step, 100)


@pytest.mark.parametrize('steps', [1, 7, 75, 143, 1000, 12345.6])
def test_what_was_taken_at_the_full_rate_is_kept(steps):
  plan = _plan(steps)
  assert plan.decay_start % 10 == plan.num_steps % 10 == 0
  assert plan.decay_start < plan.num_steps
  # The same run, or one asked to be shorter, ends as planned.
  assert _plan(steps, taken=plan.decay_start) == plan
  assert _plan(steps / 2, taken=plan.decay_start) == plan
  assert _plan(2 * steps + 20, taken=plan.decay_start) == _plan(2 * steps + 20)


def test_an_early_stop_begins_the_decay():
  assert _plan(1000, stop=450) == plan_lib.Plan(450, 500)
  assert _plan(1000, taken=540, stop=450) == plan_lib.Plan(540, 600)
  assert _plan(1000, stop=2000) == _plan(1000)
