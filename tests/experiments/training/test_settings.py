"""Settings that may or may not change while a training run goes on."""

import dataclasses

import pytest

from experiments.training import training as training_lib
import specsample
from specsample.training import heads
from specsample.training import losses

_DATA = ['0123456789abcdef']


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


def test_what_makes_the_curve_may_not(training):
  other = dataclasses.replace(
    training,
    warmup_steps=7,
    objective=dataclasses.replace(
      training.objective,
      teacher_loss=losses.jsd,
      drafter=dataclasses.replace(training.objective.drafter, num_layers=5),
    ),
  )
  before, after = (
    training.header(_DATA),
    other.header(_DATA),
  )
  changed = {
    'Training.warmup_steps': 7,
    'HeadsObjective.teacher_loss': 'jsd',
    'Hydra.num_layers': 5,
  }
  assert after == before | {'settings': before['settings'] | changed}
  assert before['settings'].items().isdisjoint(changed.items())
