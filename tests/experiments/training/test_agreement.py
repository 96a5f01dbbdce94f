"""Settings that may or may not change while a training run goes on."""

import dataclasses

import pytest

from experiments.training import agreement
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


def _differences(before, after, left_out=()):
  found = agreement.Agreement(before, _DATA).header
  found = {name: x for name, x in found.items() if name not in left_out}
  new = agreement.Agreement(after, _DATA)
  return new.differences(found, new.header)


@pytest.mark.parametrize(
  'settings',
  [
    {'epochs': 7.0, 'decay': 0.2, 'patience': 3},
    {'epochs': None, 'answer_tokens': 10**6},
    {'evaluate_every': 7, 'checkpoint_seconds': 1.0, 'cache_hidden': False},
  ],
)
def test_how_long_and_how_often_may_change(training, settings):
  assert _differences(training, dataclasses.replace(training, **settings)) == []


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
  num_layers = training.objective.drafter.num_layers
  assert _differences(training, other) == [
    'Training.warmup_steps (it has 100, this run has 7)',
    "HeadsObjective.teacher_loss (it has 'forward_kl', this run has 'jsd')",
    f'Hydra.num_layers (it has {num_layers}, this run has 5)',
  ]


def test_a_new_setting_has_to_have_its_default(training):
  new = ('Training.clip_norm', 'HeadsObjective.decay')
  assert _differences(training, training, left_out=new) == []
  other = dataclasses.replace(training, clip_norm=0.5)
  assert _differences(training, other, left_out=new) == [
    'Training.clip_norm (it has 1.0, this run has 0.5)'
  ]
  # Without a default, the value that the run had is unknown.
  name = 'Hydra.num_draft_tokens'
  assert _differences(training, training, left_out=[name]) == [name]


def test_a_setting_that_is_gone_is_not_compared(training):
  new = agreement.Agreement(training, _DATA)
  assert new.differences(new.header | {'Training.gone': 1}, new.header) == []
