"""The configurations of `compile_tpu` have the sizes that they state."""

import dataclasses
import math
import pathlib

import gin
import jax
import pytest

from experiments.tpu import compilation
from specsample import drafters
from specsample import types
from specsample import verify

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# All weights of the Llamas as published; Chinchilla and its drafter to the
# digits that the papers give.
_PARAMETERS = {
  'chinchilla': (
    pytest.approx(70e9, rel=0.01),
    pytest.approx(4e9, rel=0.01),
  ),
  'llama_70b': (70_553_706_496, 1_235_814_400),
  'llama_405b': (405_853_388_800, 8_030_261_248),
}
_TRAINED = (
  *(drafters.DraftModel, drafters.Medusa, drafters.Hydra, drafters.Eagle),
  *(drafters.Eagle3, drafters.MTP, drafters.DFlash, drafters.DSpark),
)
_TOPOLOGIES = {
  'chinchilla': ('v4:2x2x4',),
  'llama_70b': ('v5e:4x4', 'v6e:4x4', 'v5p:2x2x4'),
  'llama_405b': ('v5p:4x4x4',),
}
# The drafter's kind, the target's parameters as docs/models.md has them, and
# the layers that the drafter reads.
_OTHER_FAMILIES = {
  'gpt_oss_20b': (drafters.Eagle3, 20_914_757_184, (1, 11, 21)),
  'gemma_4_e4b': (
    drafters.Assistant,
    7_463_013_418,
    (types.KeysAndValues(22), types.KeysAndValues(23)),
  ),
  'qwen3_5_4b': (drafters.DFlash, 4_205_751_296, (1, 8, 15, 22, 29)),
  'qwen3_6_27b': (drafters.DFlash, 26_895_998_464, (1, 16, 31, 46, 61)),
}


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  gin.parse_config_file('configs/runs/pods.gin')
  yield
  gin.clear_config()


@pytest.fixture(params=_PARAMETERS)
def configured(request):
  """A configuration's name, and what it sets up."""
  return request.param, _recipe(request.param)


def _recipe(name):
  with gin.config_scope(name):
    return compilation.CompileTpu()


def _num_parameters(model):
  """Counts a model's parameters, given that its layers are alike."""
  one, two = (
    sum(
      math.prod(leaf.shape)
      for leaf in jax.tree.leaves(
        dataclasses.replace(model, num_layers=num_layers).abstract_params()
      )
    )
    for num_layers in (1, 2)
  )
  return one + (model.num_layers - 1) * (two - one)


def test_sizes_are_those_of_the_named_models(configured):
  name, config = configured
  found = _num_parameters(config.model), _num_parameters(config.draft_model)
  assert found == _PARAMETERS[name]
  assert config.drafter.model == config.draft_model
  assert config.topologies == _TOPOLOGIES[name]
  assert config.model.dtype == config.draft_model.dtype == 'bfloat16'


@pytest.mark.parametrize(
  ('kind', 'num_nodes'),
  [
    *((cls.__name__, 64) for cls in _TRAINED if hasattr(cls, 'grow')),
    *(('Eagle3', 16), ('Eagle3', 256)),
  ],
)
def test_trees_of_a_trained_drafter_are_configured_for_a_pod(kind, num_nodes):
  gin.parse_config(
    [
      f'llama_8b/trees/drafters.Tree.drafter = @{kind}()',
      f'llama_8b/trees/tree.best.num_nodes = {num_nodes}',
    ]
  )
  config = _recipe('llama_8b/trees')
  assert config.drafter.num_draft_tokens == num_nodes
  assert type(config.drafter.drafter).__name__ == kind
  assert config.drafter.drafter.model == config.model
  assert config.drafter.depth == 5
  assert config.drafter.kind in config.verify.draft_kinds
  assert _num_parameters(config.model) == 8_030_261_248


@pytest.mark.parametrize('kind', [cls.__name__ for cls in _TRAINED])
def test_every_trained_drafter_is_configured_for_a_pod(kind):
  gin.parse_config(f'llama_8b/CompileTpu.drafter = @{kind}()')
  config = _recipe('llama_8b')
  assert type(config.drafter).__name__ == kind
  assert _num_parameters(config.model) == 8_030_261_248
  assert config.drafter.model == config.model
  assert config.verify == verify.chain
  assert config.topologies == ('v5e:2x4', 'v6e:2x4', 'v5p:2x2x2')


@pytest.mark.parametrize('name', _OTHER_FAMILIES)
def test_layers_that_differ_have_the_published_sizes(name):
  kind, num_parameters, features = _OTHER_FAMILIES[name]
  config = _recipe(name)
  found = jax.tree.leaves(config.model.abstract_params())
  assert sum(math.prod(leaf.shape) for leaf in found) == num_parameters
  assert type(config.drafter) is kind
  assert config.drafter.model == config.model
  assert config.drafter.feature_layers == features
  assert config.verify == verify.chain
  assert config.model.dtype == 'bfloat16'
