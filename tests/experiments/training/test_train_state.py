"""Damaged checkpoints of the state that training and serving resume from."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training import train_state
from specsample.training import step as step_lib


def _state(step):
  # Random numbers, which don't compress.
  draw = lambda: jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
  rng = np.random.default_rng(step)
  return step_lib.TrainState(
    step=jnp.int32(step), trained={'kernel': draw()}, optimizer=(draw(),)
  )


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


@pytest.mark.parametrize('damage', [_cut, _empty, _remove_some])
def test_a_damaged_one_is_named_and_the_one_before_is_there(
  saved, tmp_path, damage
):
  folder = shutil.copytree(saved, tmp_path / 'checkpoints')
  damage(folder / '10')
  with pytest.raises(ValueError) as raised:
    train_state.Checkpoints(folder).restore(_state(0), 10)
  (message,) = str(raised.value).splitlines()
  assert message.startswith(
    f'{folder / "10"} is damaged, or belongs to another run ('
  )
  assert message.endswith(
    'delete it to continue from the checkpoint before it, or give another --out'
  )
  # Follow the message's advice.
  shutil.rmtree(folder / '10')
  checkpoints = train_state.Checkpoints(folder)
  assert checkpoints.step == 5
  found = checkpoints.restore(_state(0), 5)
  jax.tree.map(np.testing.assert_array_equal, found, _state(5))


def test_one_of_other_parameters_is_refused(saved):
  other = dataclasses.replace(_state(0), trained={'other': jnp.zeros(3)})
  with pytest.raises(
    ValueError, match='10 is damaged, or belongs to another run'
  ):
    train_state.Checkpoints(saved).restore(other, 10)


def test_what_a_killed_run_left_is_deleted_before_anything_else(saved):
  unfinished = saved / '15.orbax-checkpoint-tmp-3'
  unfinished.mkdir()
  checkpoints = train_state.Checkpoints(saved)
  assert not unfinished.exists()
  assert checkpoints.step == 10
  checkpoints.close()
