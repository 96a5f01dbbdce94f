"""A run that only measures rollouts, and what a header tells apart."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments import methods
from experiments.command import clock
from experiments.command import journal as journal_lib
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import reinforcement
from experiments.reinforcement import rewarded
from experiments.reinforcement import trainer as trainer_lib
from experiments.training import train_state
import specsample
from specsample import drafters
from specsample import verify


def _arm(costs=None):
  drafter = drafters.Suffix(num_draft_tokens=1, costs=costs)
  method = methods.Method(drafter, verify.coupled, params={})
  return arm_lib.Arm(method=method, num_rows=2)


@pytest.fixture(scope='module')
def settings(checkpoint):
  return reinforcement.Reinforcement(
    target=specsample.load(checkpoint),
    arms={'suffix': _arm()},
    largest=2,
    train=1,
    held_out=1,
    prompts=1,
    answers=2,
    max_new_tokens=2,
    steps=1,
    updates=0,
  )


@pytest.fixture
def trainer_of(tmp_path):
  """A function that returns the trainer of settings, in a folder of its own."""
  journal = journal_lib.Journal(tmp_path, {})
  checkpoints = train_state.Checkpoints(tmp_path / 'checkpoints')
  yield lambda settings: trainer_lib.Trainer(
    settings=settings, journal=journal, checkpoints=checkpoints
  )
  checkpoints.close()
  journal.close()


def test_without_updates_the_policy_is_the_target_itself(settings, trainer_of):
  trainer = trainer_of(settings)
  state, frozen = trainer._begin()
  assert not jax.tree.leaves((state.policy, frozen))
  assert trainer.run() is settings.target.params
  assert len(trainer.journal.of(trainer_lib.STEP)) == 1


def test_a_checkpoint_without_its_journal_is_refused(settings, trainer_of):
  trainer = trainer_of(dataclasses.replace(settings, updates=1))
  state, _ = trainer._begin()
  trainer.checkpoints.save(dataclasses.replace(state, step=jnp.int32(1)))
  message = 'of step 1 .* delete the folders checkpoints and policy too'
  with pytest.raises(ValueError, match=message):
    trainer.run()


@dataclasses.dataclass(frozen=True)
class _Mine(drafters.NoDraft):
  """A drafter in neither package, as users write them."""


def test_code_of_ones_own_is_in_the_header(settings):
  code = lambda settings: trainer_lib.header(settings)['code of the arms']
  assert code(settings) == {'suffix': {}}
  method = methods.Method(_Mine(), verify.coupled)
  mine = dataclasses.replace(
    settings, arms={'mine': arm_lib.Arm(method=method)}
  )
  assert list(code(mine)['mine']) == [__name__]


def test_an_update_that_still_runs_is_not_timed_with_the_rollouts(settings):
  def draw(policy):
    return rewarded.draw(
      settings,
      settings.arms['suffix'],
      {'target': policy, 'drafter': {}},
      settings.questions.train,
      jax.random.key(0),
      num_answers=2,
      temperature=1.0,
    )

  @jax.jit
  def update(policy):
    large = jnp.full((1024, 1024), 1 / 1024)
    large = jax.lax.fori_loop(0, 40, lambda _, x: x @ x, large)
    return jax.tree.map(lambda x: large[0, 0] * x, policy)

  policy = settings.target.params
  draw(update(policy))  # compiles
  _, seconds = clock.seconds(update, policy)
  assert draw(update(policy)).seconds < seconds / 2


def test_drafters_that_were_timed_anew_are_another_run(settings):
  headers = [
    trainer_lib.header(dataclasses.replace(settings, arms={'suffix': arm}))
    for arm in (_arm((1.0, 1.1)), _arm((1.0, 1.1)), _arm((1.0, 1.2)))
  ]
  assert journal_lib.differences(headers[0], headers[1]) == []
  assert journal_lib.differences(headers[0], headers[2]) == ['drafters']
