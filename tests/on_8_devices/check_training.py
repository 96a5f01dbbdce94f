"""A training step on a mesh equals one on a single device."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from experiments.training import held_out
from specsample import drafters
from specsample import sharding
from specsample import testing
from specsample.models import transformer
from specsample.training import dflash
from specsample.training import draft
from specsample.training import eagle
from specsample.training import heads
from specsample.training import on_policy
from specsample.training import step

TARGET = transformer.Transformer(
  vocab_size=64,
  num_layers=1,
  dim=32,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=48,
  max_length=512,
)
OBJECTIVES = {
  'medusa-2': heads.HeadsObjective(
    drafter=drafters.Medusa(model=TARGET, num_draft_tokens=2),
    target_weight=1.0,
  ),
  'hydra++': heads.HeadsObjective(
    drafter=drafters.Hydra(
      model=TARGET,
      num_draft_tokens=2,
      num_layers=2,
      draft_vocab_size=24,
      prefix_attention=True,
    ),
    teacher_weight=1.0,
  ),
  'draft model': draft.DraftObjective(
    drafter=drafters.DraftModel(
      model=TARGET, num_draft_tokens=2, layers=(0,), draft_vocab_size=24
    ),
    teacher_weight=1.0,
  ),
  'dspark': dflash.DSparkObjective(
    drafter=drafters.DSpark(
      model=TARGET,
      num_draft_tokens=2,
      feature_layers=(-1, 0),
      num_layers=1,
      draft_vocab_size=24,
      rank=8,
    ),
    num_blocks=3,
  ),
  'dflash 2': dflash.DFlash2Objective(
    drafter=drafters.DFlash2(
      model=TARGET,
      num_draft_tokens=2,
      feature_layers=(-1, 0),
      num_layers=1,
      draft_vocab_size=24,
      selector_rank=8,
      selector_top_k=4,
    ),
    num_blocks=3,
  ),
  'eagle-3': eagle.FeatureObjective(
    drafter=drafters.Eagle3(
      model=TARGET,
      num_draft_tokens=2,
      feature_layers=(-1, 0, 0),
      draft_vocab_size=24,
    ),
    num_steps=3,
  ),
}
OBJECTIVES['dspark, rnn'] = dataclasses.replace(
  OBJECTIVES['dspark'],
  drafter=dataclasses.replace(OBJECTIVES['dspark'].drafter, head='rnn'),
)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
BATCH = {
  'tokens': np.random.default_rng(0).integers(64, size=(8, 12)),
  'mask': np.random.default_rng(1).random((8, 12)) < 0.7,
  'places': np.arange(8)[:, None] % 3 + np.arange(10),
}
PACKED = {
  'tokens': np.tile(BATCH['tokens'], (2, 1)),
  'mask': np.random.default_rng(2).random((16, 12)) < 0.7,
  'starts': np.where(np.arange(16)[:, None] % 2, [[0, 7]], [[0, 12]]),
}


@functools.cache
def host_params(name):
  drafter = OBJECTIVES[name].drafter
  target = TARGET.init(jax.random.key(0))
  size = drafter.draft_vocab_size
  d2t = None if size is None else 63 - 2 * np.arange(size)
  own = drafter.init_params(jax.random.key(1), target, d2t)
  own = testing.with_noise(own, jax.random.key(2))
  return jax.device_get({'target': target, 'drafter': own})


def train(params, name, batch=BATCH, num_parts=1):
  """Returns the parameters and the report after two steps."""
  objective = OBJECTIVES[name]
  is_trained = {
    'target': jax.tree.map(lambda _: name == 'medusa-2', params['target']),
    'drafter': objective.drafter.is_trained(),
  }
  state, frozen = step.init(params, is_trained, OPTIMIZER)
  batch = sharding.place(batch, dict.fromkeys(batch, ('batch', None)))
  before = jax.tree.map(lambda x: x.sharding, state)
  for _ in range(2):
    state, report = step.train_step(
      state,
      frozen,
      batch,
      objective=objective,
      optimizer=OPTIMIZER,
      num_parts=num_parts,
    )
  if jax.sharding.get_mesh().are_all_axes_explicit:
    # Otherwise the compiler may divide what was not declared whole.
    assert jax.tree.map(lambda x: x.sharding, state) == before
  return jax.device_get((step.join(state.trained, frozen), report))


def train_on(mesh, params, name, *args, **kwargs):
  """Does the same on a mesh."""
  with jax.set_mesh(mesh):
    placed = sharding.place(params, axes_of(OBJECTIVES[name]))
    return train(placed, name, *args, **kwargs)


def axes_of(objective):
  return {
    'target': TARGET.param_axes(),
    'drafter': objective.drafter.param_axes(),
  }


@functools.cache
def unsharded(name):
  return train(host_params(name), name)


@pytest.mark.nightly(but=('1x8-auto-eagle-3', '2x4-explicit-medusa-2'))
@pytest.mark.parametrize('name', OBJECTIVES)
def test_step_is_that_of_one_device(mesh, name):
  params = host_params(name)
  found = train_on(mesh, params, name)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
    found,
    unsharded(name),
  )
  moved = lambda x, y: np.abs(x - y).max() if x.dtype.kind == 'f' else 0
  tree = jax.tree.map(moved, found[0], params)
  assert max(jax.tree.leaves(tree['drafter'])) > 1e-3


@pytest.mark.slow
@pytest.mark.nightly(but=('2x4-explicit-eagle-3',))
@pytest.mark.parametrize('name', ['draft model', 'dspark', 'eagle-3'])
def test_step_of_packed_rows_is_that_of_one_device(mesh, name):
  params = host_params(name)
  found = train_on(mesh, params, name, PACKED, num_parts=2)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
    found,
    train(params, name, PACKED, num_parts=2),
  )


LONG = {
  'tokens': np.random.default_rng(0).integers(64, size=(4, 512)),
  'mask': np.random.default_rng(1).random((4, 512)) < 0.7,
}
LONG_AND_PACKED = LONG | {'starts': np.asarray(4 * [[0, 200]])}


def step_of_long_rows(name, batch):
  """Returns the parameters and the report, and the bytes of what is computed.

  The gradient is accumulated over two parts.
  """
  objective = OBJECTIVES[name]
  params = host_params(name)
  axes = axes_of(objective)
  is_trained = {
    'target': jax.tree.map(lambda _: False, params['target']),
    'drafter': objective.drafter.is_trained(),
  }
  state, frozen = step.init(sharding.place(params, axes), is_trained, OPTIMIZER)
  before = jax.tree.map(lambda x: x.sharding, state)
  batch = held_out.place(batch)
  program = step.train_step.lower(
    *(state, frozen, batch),
    objective=objective,
    optimizer=OPTIMIZER,
    num_parts=2,
  ).compile()
  state, report = program(state, frozen, batch)
  # The next step needs no other program.
  is_kept = lambda x, before: x.sharding.is_equivalent_to(before, x.ndim)
  assert jax.tree.all(jax.tree.map(is_kept, state, before))
  found = jax.device_get((step.join(state.trained, frozen), report))
  return found, program.memory_analysis().temp_size_in_bytes


# With data = 2, dividing the rows alone would take half of the memory.
@pytest.mark.slow
@pytest.mark.nightly(
  but=('dspark-shape1-batch1-6', 'eagle-3-shape4-batch4-3.5')
)
@pytest.mark.parametrize(
  ('name', 'shape', 'batch', 'least'),
  [
    ('draft model', (1, 1, 8), LONG, 6),
    ('dspark', (1, 1, 8), LONG, 6),
    ('eagle-3', (1, 1, 8), LONG, 6),
    ('dspark', (2, 1, 4), LONG_AND_PACKED, 3.5),
    ('eagle-3', (2, 2, 2), LONG_AND_PACKED, 3.5),
  ],
)
def test_tokens_of_long_rows_are_divided(name, shape, batch, least):
  """A device needs less memory, and the step is that of one device."""
  data, model, sequence = shape
  batch = {name: x[: 2 * data] for name, x in batch.items()}
  # A mesh of one device, because without a mesh attention is not XLA's.
  devices = jax.devices()[:1]
  with jax.set_mesh(sharding.make_mesh(devices=devices, explicit=False)):
    expected, whole = step_of_long_rows(name, batch)
  mesh = sharding.make_mesh(data, model, sequence=sequence, explicit=False)
  with jax.set_mesh(mesh):
    found, of_device = step_of_long_rows(name, batch)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5),
    found,
    expected,
  )
  assert whole > least * of_device


@functools.cache
def written(mesh):
  params = host_params('draft model')
  objective = OBJECTIVES['draft model']
  batch = BATCH
  if mesh is not None:
    axes = axes_of(objective)
    params = sharding.place(params, axes)
    batch = sharding.place(BATCH, dict.fromkeys(BATCH, ('batch', None)))
  return jax.device_get(
    on_policy.resample(
      params, batch, jax.random.key(0), drafter=objective.drafter
    )
  )


@pytest.mark.slow
@pytest.mark.nightly(but=('2x4-explicit',))
def test_own_texts_are_those_of_one_device(mesh):
  expected = written(None)
  with jax.set_mesh(mesh):
    found = written(mesh)
  jax.tree.map(np.testing.assert_array_equal, found, expected)
