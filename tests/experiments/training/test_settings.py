"""The length and rate of a run, and what may change while it goes on."""

import dataclasses

import numpy as np
import pytest

from experiments.training import training as training_lib
import specsample
from specsample.training import heads
from specsample.training import losses

_DATA = ['0123456789abcdef']


def _plan(steps, taken=0):
  return training_lib.plan(steps, unit=10, decay=0.1, taken=taken)


def test_rate_rises_stays_and_falls():
  plan = _plan(1000)
  assert plan == training_lib.Plan(900, 1000)
  rate = training_lib.rate(2.0, plan, warmup=4)
  rates = np.asarray(rate(np.arange(1000)))
  assert rates[:5].tolist() == [0.5, 1.0, 1.5, 2.0, 2.0]
  assert set(rates[4:900].tolist()) == {2.0}
  assert np.all(np.diff(rates[899:]) < 0)
  assert 0 < rates[-1] < 0.02
  # The rate has halved after a quarter of the decay.
  assert rates[925] == pytest.approx(1.0, abs=0.02)


def test_rate_may_begin_later():
  plan = _plan(1000)
  rate = training_lib.rate(1.0, plan, warmup=2, first=50)
  found = [float(rate(i)) for i in (0, 49, 50, 51, 52)]
  assert found == [0.0, 0.0, 0.5, 1.0, 1.0]
  assert training_lib.rate(1.0, plan, warmup=0)(0) == 1.0


def test_up_to_the_decay_a_longer_run_has_the_same_rates():
  short, long = _plan(1000), _plan(5000)
  steps = np.arange(short.decay_start)
  rates = [training_lib.rate(1.0, plan, 100)(steps) for plan in (short, long)]
  np.testing.assert_array_equal(*rates)


@pytest.mark.parametrize('steps', [1, 7, 75, 143, 1000, 12345.6])
def test_what_was_taken_at_the_full_rate_is_kept(steps):
  plan = _plan(steps)
  assert plan.decay_start % 10 == plan.num_steps % 10 == 0
  assert plan.decay_start < plan.num_steps
  # The same run, or one asked to be shorter, ends as planned.
  assert _plan(steps, taken=plan.decay_start) == plan
  assert _plan(steps / 2, taken=plan.decay_start) == plan
  assert _plan(2 * steps + 20, taken=plan.decay_start) == _plan(2 * steps + 20)


@pytest.fixture(scope='module')
def training(checkpoint):
  target = specsample.load(checkpoint)
  drafter = specsample.drafters.Hydra(model=target.model, num_draft_tokens=2)
  return training_lib.Training(
    target=target, objective=heads.HeadsObjective(drafter=drafter)
  )


@pytest.mark.parametrize(
  'settings',
  [
    {'epochs': 7.0, 'decay': 0.2},
    {'epochs': None, 'answer_tokens': 10**6},
    {'evaluate_every': 7, 'checkpoint_seconds': 1.0, 'cache_hidden': False},
  ],
)
def test_how_long_and_how_often_may_change(training, settings):
  other = dataclasses.replace(training, **settings)
  assert other.header(_DATA) == training.header(_DATA)


def test_what_makes_the_curve_may_not_change(training):
  other = dataclasses.replace(
    training,
    warmup_steps=7,
    objective=dataclasses.replace(
      training.objective,
      teacher_loss=losses.jsd,
      drafter=dataclasses.replace(training.objective.drafter, num_layers=5),
    ),
  )
  before, after = training.header(_DATA), other.header(_DATA)
  changed = {
    'Training.warmup_steps': 7,
    'HeadsObjective.teacher_loss': 'jsd',
    'Hydra.num_layers': 5,
  }
  assert after == before | {'settings': before['settings'] | changed}
  assert before['settings'].items().isdisjoint(changed.items())
