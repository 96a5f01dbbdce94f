"""A training step: what changes, in which dtype, and what a NaN does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specsample.models import packed
from specsample.training import losses
from specsample.training import step

_SGD = optax.sgd(0.5)
_ADAM = optax.adam(0.1)
_IS_TRAINED = {'target': {'w': False}, 'drafter': {'u': True, 'ids': False}}
_TARGET = np.asarray([[1.0, 2.0], [3.0, -1.0]], np.float32)
_BATCH = {'x': np.asarray([[1.0, -2.0], [0.5, 1.0]], np.float32)}


def _params():
  return {
    'target': {'w': jnp.asarray(_TARGET)},
    'drafter': {'u': jnp.full((2, 2), 0.25), 'ids': jnp.arange(2)},
  }


def _objective(params, batch):
  drafter = params['drafter']
  x = batch['x'].astype(drafter['u'].dtype)
  error = (x @ drafter['u'])[:, drafter['ids']] - x @ params['target']['w']
  loss = jnp.mean(jnp.square(error.astype(jnp.float32)))
  return loss, {'is_half': drafter['u'].dtype == jnp.bfloat16}


def _step(state, frozen, batch=_BATCH, **settings):
  return step.train_step(
    state, frozen, batch, objective=_objective, optimizer=_SGD, **settings
  )


def test_is_a_step_down_the_gradient_of_what_is_trained():
  params = _params()
  state, frozen = step.init(params, _IS_TRAINED, _SGD)
  state, report = _step(state, frozen)
  x, u = _BATCH['x'], np.full((2, 2), 0.25)
  error = x @ u - x @ _TARGET
  gradient = 2 * x.T @ error / error.size
  np.testing.assert_allclose(
    state.trained['drafter']['u'], u - 0.5 * gradient, rtol=1e-6
  )
  np.testing.assert_allclose(report['loss'], np.mean(error**2), rtol=1e-6)
  np.testing.assert_allclose(
    report['gradient_norm'], np.linalg.norm(gradient), rtol=1e-6
  )
  assert state.step == 1
  # The arrays that were passed in still exist.
  np.testing.assert_array_equal(params['drafter']['u'], 0.25)
  whole = step.join(state.trained, frozen)
  assert whole['target']['w'] is params['target']['w']
  assert whole['drafter']['ids'] is params['drafter']['ids']
  assert jax.tree.structure(whole) == jax.tree.structure(params)


def test_computes_in_bfloat16_on_float32_weights():
  half = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, _params()
  )
  optimizer = optax.sgd(1e-5)
  state, frozen = step.init(half, _IS_TRAINED, optimizer, 'bfloat16')
  for _ in range(3):
    state, report = step.train_step(
      state,
      frozen,
      _BATCH,
      objective=_objective,
      optimizer=optimizer,
      dtype='bfloat16',
    )
  assert report['is_half']
  moved = np.abs(np.asarray(state.trained['drafter']['u']) - 0.25)
  assert state.trained['drafter']['u'].dtype == jnp.float32
  # Less than bfloat16 resolves at that size, but not lost.
  assert 0 < moved.max() < 2**-10


def test_what_is_frozen_is_held_as_it_is_computed_with():
  _, frozen = step.init(_params(), _IS_TRAINED, _SGD, 'bfloat16')
  assert frozen['target']['w'].dtype == jnp.bfloat16
  assert frozen['drafter']['ids'].dtype == jnp.int32


def _packed_flags(is_trained):
  flag = packed.Packed(values=is_trained['target']['w'], num_out=len(_TARGET.T))
  return is_trained | {'target': {'w': flag}}


def _packed(params):
  return params | {'target': {'w': packed.pack(params['target']['w'])}}


@pytest.mark.parametrize('trains_target', [False, True])
def test_a_checkpoint_does_not_say_how_a_matrix_is_stored(trains_target):
  is_trained = _IS_TRAINED | {'target': {'w': trains_target}}
  state, _ = step.init(_params(), is_trained, _ADAM)
  other, frozen = step.init(
    _packed(_params()), _packed_flags(is_trained), _ADAM
  )
  assert jax.tree.structure(other) == jax.tree.structure(state)
  whole = step.join(other.trained, frozen)['target']['w']
  np.testing.assert_array_equal(np.asarray(whole), _TARGET)
  assert packed.is_packed(whole) != trains_target


def test_a_packed_matrix_in_another_dtype_is_an_array():
  _, frozen = step.init(
    _packed(_params()), _packed_flags(_IS_TRAINED), _SGD, 'bfloat16'
  )
  np.testing.assert_array_equal(
    frozen['target']['w'], jnp.asarray(_TARGET, jnp.bfloat16)
  )


def _flat(params, batch):
  """Returns a loss that is 0 where its gradient is infinite or NaN."""
  u = params['drafter']['u']
  return jnp.sum(jnp.sqrt(batch['x'] * u)), {}


@pytest.mark.parametrize(
  ('objective', 'value'),
  [(_objective, np.nan), (_objective, np.inf), (_flat, 0.0)],
)
def test_what_is_no_number_changes_no_weight(objective, value):
  take = lambda state, frozen, batch: step.train_step(
    state, frozen, batch, objective=objective, optimizer=_ADAM
  )
  state, frozen = step.init(_params(), _IS_TRAINED, _ADAM)
  state, report = take(state, frozen, {'x': np.ones((2, 2), np.float32)})
  assert report['is_finite']
  before = jax.device_get(state)
  bad = {'x': np.full((2, 2), value, np.float32)}
  state, report = take(state, frozen, bad)
  assert not report['is_finite']
  assert state.step == 2
  jax.tree.map(
    np.testing.assert_array_equal,
    (state.trained, state.optimizer),
    (before.trained, before.optimizer),
  )


def test_steps_are_one_executable():
  state, frozen = step.init(_params(), _IS_TRAINED, _SGD)
  state, _ = _step(state, frozen)
  size = step.train_step._cache_size()
  for _ in range(3):
    state, _ = _step(state, frozen)
  assert step.train_step._cache_size() == size


def test_that_nothing_is_trained_is_refused():
  nothing = jax.tree.map(lambda _: False, _IS_TRAINED)
  with pytest.raises(ValueError, match='False for every parameter'):
    step.init(_params(), nothing, _SGD)


def test_parts_of_a_batch_take_the_step_of_the_whole():
  rng = np.random.default_rng(0)
  batch = {
    'x': rng.normal(size=(6, 4, 2)).astype(np.float32),
    # Parts have different numbers of tokens to learn.
    'mask': np.arange(4) < np.asarray([4, 1, 2, 0, 3, 1])[:, None],
  }

  def objective(params, batch):
    error = batch['x'] @ params['drafter']['u'] - 1
    square = jnp.sum(jnp.square(error), axis=-1)
    mean = losses.masked_mean(square, batch['mask'])
    return mean, {'half': mean / 2}

  def take(num_parts):
    return step.train_step(
      *step.init(_params(), _IS_TRAINED, _SGD),
      batch,
      objective=objective,
      optimizer=_SGD,
      num_parts=num_parts,
    )

  expected = take(1)
  for num_parts in (2, 3, 6):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
      take(num_parts),
      expected,
    )
  with pytest.raises(ValueError, match='num_parts is 4, but the batch has 6'):
    take(4)
