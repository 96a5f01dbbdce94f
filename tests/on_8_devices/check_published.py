"""Published drafters are sharded while read, and draft as on one device."""

import jax
import numpy as np
import pytest

import specsample
from specsample import sharding
from specsample.loading import load
from tests.loading.published import folders
from tests.loading.published import test_assistant
from tests.loading.published import test_dflash
from tests.loading.published import test_dflash2
from tests.loading.published import test_eagle
from tests.loading.published import test_heads
from tests.loading.published import test_p_eagle

LAYOUTS = {
  'medusa': (
    test_heads.TARGET,
    lambda folder: test_heads.save(
      folder, 'medusa_lm_head.pt', test_heads.medusa_tensors()
    ),
  ),
  'hydra++': (
    test_heads.TARGET,
    lambda folder: test_heads.save(
      folder, 'hydra_lm_head.pt', test_heads.hydra_tensors()
    ),
  ),
  'eagle-3': (
    test_eagle.TARGET,
    lambda folder: folders.save(
      folder,
      test_eagle.eagle3_tensors('layers.0.') | test_eagle.joint_norm(),
      test_eagle.SPECULATORS | {'norm_before_fc': True},
    ),
  ),
  'p-eagle': (
    test_eagle.TARGET,
    lambda folder: folders.save(
      folder, test_p_eagle.p_eagle_tensors(), test_p_eagle.CONFIG
    ),
  ),
  'dflash 2': (
    test_dflash.TARGET,
    lambda folder: folders.save(
      folder, test_dflash2.tensors(), test_dflash2.config()
    ),
  ),
  'dspark': (
    test_dflash.TARGET,
    lambda folder: folders.save(
      folder,
      test_dflash.dflash_tensors(has_head=True, rank=test_dflash.RANK),
      test_dflash.DSPARK,
    ),
  ),
}
PROMPTS, LENGTHS = specsample.pad_prompts([[1, 2, 3, 1, 2, 3], [5], [7, 8, 7]])


def generate(target, loaded):
  return jax.device_get(
    specsample.generate(
      {'target': target.params, 'drafter': loaded.params},
      PROMPTS,
      LENGTHS,
      jax.random.key(0),
      model=target.model,
      drafter=loaded.drafter,
      verify=specsample.verify.block,
      sampling=specsample.Sampling(temperature=1.0),
      max_new_tokens=10,
    )
  )


@pytest.mark.nightly(but=('eagle-3',))
@pytest.mark.parametrize('name', LAYOUTS)
def test_drafts_are_those_of_one_device(tmp_path, name):
  target, save = LAYOUTS[name]
  folder = save(tmp_path)
  whole = specsample.load_drafter(folder, target)
  expected = generate(target, whole)
  assert specsample.stats.summarize(expected).kept
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    placed = sharding.place(
      jax.device_get(target.params), target.model.param_axes()
    )
    divided = load.Loaded(target.model, placed, None)
    loaded = specsample.load_drafter(folder, divided)
    assert loaded.drafter == whole.drafter
    wanted = sharding.of_tree(loaded.drafter.param_axes())
    found = jax.tree.map(lambda x: x.sharding, loaded.params)
    jax.tree.map(lambda x, y: None if x == y else pytest.fail(), found, wanted)
    generated = generate(divided, loaded)
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(loaded.params),
    jax.device_get(whole.params),
  )
  for field in ('tokens', 'lengths', 'accepted'):
    np.testing.assert_array_equal(
      getattr(generated, field), getattr(expected, field), field
    )


@pytest.mark.nightly
def test_an_assistant_drafts_as_on_one_device(tmp_path):
  """It reads keys and values that the mesh divides by heads."""
  for name in ('target', 'assistant'):
    (tmp_path / name).mkdir()
  test_assistant.save_target(tmp_path / 'target')
  test_assistant.save(tmp_path / 'assistant', is_ordered=True)

  def run():
    target = specsample.load(tmp_path / 'target')
    loaded = specsample.load_drafter(tmp_path / 'assistant', target, 3)
    return generate(target, loaded)

  expected = run()
  with jax.set_mesh(sharding.make_mesh(2, 4)):
    found = run()
  for field in ('tokens', 'lengths', 'origin', 'accepted'):
    np.testing.assert_array_equal(
      getattr(found, field), getattr(expected, field), field
    )
