"""Which states a training run keeps, and what TensorBoard reads of it."""

import dataclasses
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import history as history_lib
from experiments.training import train_state
from experiments.training import training
from specsample.training import step as step_lib
from tests.experiments.training import event_files

_PLAN = training.Plan(40, 50)  # of 50 steps, a fifth of them decay
_LENGTHS = {'unit': 10, 'decay': 0.2}


def _state(step):
  rng = np.random.default_rng(step)
  # Random numbers, which don't compress.
  draw = lambda: jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
  return step_lib.TrainState(
    step=jnp.int32(step), trained={'kernel': draw()}, optimizer=(draw(),)
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


def test_run_begins_without_a_checkpoint(tmp_path):
  step, found = _resume(train_state.Checkpoints(tmp_path), 50)
  assert (step, found) == (0, history_lib.History(run='a', plan=_PLAN))


def test_best_is_kept_and_what_a_longer_run_needs(run):
  # The best, the best before the decay, its start, and the last two.
  assert run.steps == [20, 40, 50]
  step, found = _resume(run, 50)
  assert (step, found.best['step']) == (50, 50)
  assert found.seen() == {10: 7, 20: 14, 30: 21, 40: 28, 50: 35}
  found = run.restore(_state(0), 20)
  jax.tree.map(np.testing.assert_array_equal, found, _state(20))


def test_decay_is_left_for_a_longer_run(run):
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


def test_checkpoint_of_another_run_is_refused(run):
  with pytest.raises(ValueError, match='step 50 belongs to another run: del'):
    _resume(run, 50, run='b')


def test_numbers_and_lists_of_them_are_scalars(tmp_path):
  with history_lib.tensorboard(tmp_path / 'events') as observe:
    observe('train', {'step': 20, 'loss': 1.5})
    observe(
      'held out',
      {
        'step': 20,
        'tokens_per_round': 1.25,
        'acceptance_by_position': [0.5, None],
      },
    )
  (path,) = (tmp_path / 'events').iterdir()
  assert event_files.scalars(path) == [
    ('train/step', 20, 20.0),
    ('train/loss', 20, 1.5),
    ('held_out/step', 20, 20.0),
    ('held_out/tokens_per_round', 20, 1.25),
    ('held_out/acceptance_by_position/1', 20, 0.5),
  ]


def test_remedy_is_named_without_the_package(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with (
    pytest.raises(ValueError, match=r"pip install 'specsample\[tensorboard\]'"),
    history_lib.tensorboard(tmp_path),
  ):
    pass


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with two checkpoints."""
  folder = tmp_path_factory.mktemp('checkpoints')
  checkpoints = train_state.Checkpoints(folder)
  for step in (5, 10):
    checkpoints.save(_state(step))
  return folder


def _cut(folder):
  """Truncates the data files, as a full disk does."""
  for path in folder.rglob('*'):
    if path.is_file() and path.stat().st_size > 1000:
      path.write_bytes(path.read_bytes()[:100])


def _empty(folder):
  for path in folder.rglob('*'):
    if path.is_file():
      path.write_bytes(b'')


def _remove_some(folder):
  for path in folder.rglob('*'):
    if path.is_file() and path.name != '_CHECKPOINT_METADATA':
      path.unlink()


_DAMAGED = 'is damaged, or belongs to another run'


@pytest.mark.parametrize('damage', [_cut, _empty, _remove_some])
def test_damaged_checkpoint_is_named_and_the_one_before_is_there(
  saved, tmp_path, damage
):
  folder = shutil.copytree(saved, tmp_path / 'checkpoints')
  damage(folder / '10')
  with pytest.raises(ValueError) as raised:
    train_state.Checkpoints(folder).restore(_state(0), 10)
  (message,) = str(raised.value).splitlines()
  assert message.startswith(f'{folder / "10"} {_DAMAGED} (')
  assert message.endswith(
    'delete it to continue from the checkpoint before it, or give another --out'
  )
  # Follow the message's advice.
  shutil.rmtree(folder / '10')
  checkpoints = train_state.Checkpoints(folder)
  assert checkpoints.step == 5
  found = checkpoints.restore(_state(0), 5)
  jax.tree.map(np.testing.assert_array_equal, found, _state(5))


def test_checkpoint_of_other_parameters_is_refused(saved):
  other = dataclasses.replace(_state(0), trained={'other': jnp.zeros(3)})
  with pytest.raises(ValueError, match=f'10 {_DAMAGED}'):
    train_state.Checkpoints(saved).restore(other, 10)


def test_what_a_killed_run_left_is_deleted_before_anything_else(saved):
  unfinished = saved / '15.orbax-checkpoint-tmp-3'
  unfinished.mkdir()
  checkpoints = train_state.Checkpoints(saved)
  assert not unfinished.exists()
  assert checkpoints.step == 10
  checkpoints.close()
