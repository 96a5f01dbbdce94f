"""Every configuration binds what there is, and has the sizes that it states."""

import dataclasses
import math
import pathlib

import gin
import jax
import pytest

from experiments.evaluation import evaluation as evaluation_lib
from experiments.evaluation import papers
from experiments.tpu import compilation
from specsample import drafters
from specsample import types
from specsample import verify

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_RUNS = sorted(path.stem for path in _ROOT.glob('configs/runs/*.gin'))
_FULL = sorted(path.stem for path in _ROOT.glob('configs/full/*.gin'))


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  gin.add_config_file_search_path(str(_ROOT))
  yield
  gin.clear_config()


def _methods(scope):
  with gin.config_scope(scope or None):
    bound = gin.get_bindings(
      evaluation_lib.Evaluation, resolve_references=False
    )
  found = bound.get('methods', ())
  if repr(found).startswith('%'):
    found = gin.query_parameter(repr(found))
  return set(found)


def _check_paper():
  """Checks that the paper's rows and names are of methods that are there."""
  try:
    parts = gin.query_parameter('suite.evaluations.parts')
  except ValueError:  # there is only one setting
    found = {'': _methods('')}
  else:
    found = {name: _methods(ref.config_key[0]) for name, ref in parts.items()}
  paper = papers.Paper()
  ours = [row for row in paper.rows if row[1] in found.get(row[0], ())]
  assert bool(ours) == bool(paper.rows)
  assert set(paper.names) <= set().union(*found.values())
  for part, method, over, _ in paper.ratios:
    assert {method, over} <= found[part]


@pytest.mark.slow
@pytest.mark.parametrize(
  'names',
  [
    *([f'runs/{name}'] for name in _RUNS),
    *([f'runs/{name}', f'full/{name}'] for name in _FULL),
  ],
  ids=' '.join,
)
def test_a_run_is_whole(names):
  files = [f'configs/{name}.gin' for name in names]
  gin.parse_config_files_and_bindings(files, None)
  _check_paper()


@pytest.mark.parametrize('folder', ['models', 'pairs'])
def test_models_and_pairs_can_be_read(folder):
  for path in sorted(_ROOT.glob(f'configs/{folder}/*.gin')):
    gin.clear_config()
    gin.parse_config_file(str(path))


def test_every_task_can_be_chosen():
  text = (_ROOT / 'configs/tasks.gin').read_text('utf-8')
  for line in text.splitlines():
    if line.endswith('.chat = True'):
      name = line.removesuffix('.chat = True')
      gin.clear_config()
      gin.parse_config_files_and_bindings(
        ['configs/runs/spec_bench.gin', 'configs/tasks.gin'],
        [f'Evaluation.task = @{name}()'],
      )
      task = gin.query_parameter('evaluation.Evaluation.task')
      assert task.scoped_configurable_fn().chat


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


def _recipe(name, *bindings):
  gin.parse_config_files_and_bindings(
    ['configs/runs/pods.gin'], bindings, finalize_config=False
  )
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


@pytest.mark.parametrize('name', _PARAMETERS)
def test_sizes_are_those_of_the_named_models(name):
  config = _recipe(name)
  found = _num_parameters(config.model), _num_parameters(config.draft_model)
  assert found == _PARAMETERS[name]
  assert config.drafter.model == config.draft_model
  assert config.topologies == _TOPOLOGIES[name]
  assert config.model.dtype == config.draft_model.dtype == 'bfloat16'


@pytest.mark.parametrize('kind', [cls.__name__ for cls in _TRAINED])
def test_every_trained_drafter_is_configured_for_a_pod(kind):
  config = _recipe('llama_8b', f'llama_8b/CompileTpu.drafter = @{kind}()')
  assert type(config.drafter).__name__ == kind
  assert _num_parameters(config.model) == 8_030_261_248
  assert config.drafter.model == config.model
  assert config.verify == verify.chain
  assert config.topologies == ('v5e:2x4', 'v6e:2x4', 'v5p:2x2x2')


@pytest.mark.parametrize(
  ('kind', 'num_nodes'),
  [
    *((cls.__name__, 64) for cls in _TRAINED if hasattr(cls, 'grow')),
    *(('Eagle3', 16), ('Eagle3', 256)),
  ],
)
def test_trees_of_a_trained_drafter_are_configured_for_a_pod(kind, num_nodes):
  config = _recipe(
    'llama_8b/trees',
    f'llama_8b/trees/drafters.Tree.drafter = @{kind}()',
    f'llama_8b/trees/tree.best.num_nodes = {num_nodes}',
  )
  assert config.drafter.num_draft_tokens == num_nodes
  assert config.drafter.depth == 5
  assert type(config.drafter.drafter).__name__ == kind
  assert config.drafter.drafter.model == config.model
  assert config.drafter.kind in config.verify.draft_kinds


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
