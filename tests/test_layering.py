"""Dependencies run one way: every import follows the library's layers."""

import ast
from collections.abc import Iterator
import graphlib
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]

# A module may import from the lines above its own and, within its own package,
# from its own line. The longest matching name counts.
_LAYERS = (
  # The modules of these packages have layers of their own.
  ('loading', 'loop', 'memory', 'vocabularies'),
  ('settings',),
  ('types',),
  ('drafter',),
  ('checks', 'cpu'),
  ('text.templates',),
  ('sharding', 'files', 'host', 'text.chat', 'cost.chips'),
  ('choosing.measured_here', 'constraint', 'indexing'),
  ('sampling', 'streams', 'tree', 'stats', 'cost', 'text'),
  ('drafts', 'memory.store'),
  ('memory.history',),
  ('widths',),
  ('verify', 'text.tokenizer_files', 'policies', 'vocabularies.token_bytes'),
  ('models.masks', 'models.rotary', 'models.tensors'),
  ('models.delta_rule',),
  ('models.packed',),
  ('models.int8',),
  ('models.matrices',),
  ('models.layers', 'models.cache', 'models.gated_delta', 'models.network'),
  ('models.attention', 'models.experts'),
  ('models.decoder_layer',),
  ('models', 'drafters'),
  ('loading.load',),
  ('loading.card', 'loading.published'),
  (
    *('vocabularies.padding', 'vocabularies.stop_texts'),
    'vocabularies.vocab_map',
  ),
  ('loading.drafter', 'loading.published.pard', 'loading.store_files'),
  ('loading.export', 'loading.model_card'),
  ('stopping', 'loop.decoder'),
  ('loop.emission', 'loop.passes'),
  ('loop.certified',),
  ('loop.request', 'loop.judging'),
  ('loop.initial', 'loop.step'),
  ('loop.decode', 'choosing.loops', 'choosing.estimates'),
  ('loop.refill', 'loop.turns', 'choosing.pass_times'),
  ('loop.continuous',),
  ('training', 'vocabularies.slem', 'choosing'),
  ('testing',),
  ('',),  # specsample/__init__.py
)
# The loop works with any model, drafter and verifier, so it imports none.
_LOOP_IMPORTS = {
  *(
    'types',
    'settings',
    'checks',
    'drafter',
    'stopping',
    'drafts',
    'memory.history',
    'indexing',
    'sampling',
  ),
  *('sharding', 'stats', 'streams'),
}
# The folders of experiments, from the bottom up. Each imports only lower ones;
# the commands beside them import whatever they need.
_FLOORS = (
  ('command',),
  ('reporting',),
  ('methods',),
  ('certificate', 'decoding', 'tpu'),
  ('inspection', 'tasks', 'timing', 'training_data'),
  ('training',),
  ('evaluation',),
  ('html_report',),
)
# All modules but `sharding` name an array's axes, not where they are.
_OF_A_MESH = ('PartitionSpec', 'NamedSharding', 'shard_map')
# Packages that users of the library alone need not install, and their users.
_ONLY_OUTSIDE = {
  *('absl', 'datasets', 'gin', 'matplotlib', 'rich', 'torch', 'transformers'),
  *('colab', 'experiments', 'tests'),
}


def _module(path: pathlib.Path) -> str:
  parts = path.relative_to(_ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


_FILES = {
  _module(path): path
  for package in ('specsample', 'experiments')
  for path in sorted((_ROOT / package).rglob('*.py'))
}
_LIBRARY = [name for name in _FILES if name.split('.')[0] == 'specsample']


def _imports(module: str, source: str, is_package: bool) -> Iterator[str]:
  """Yields the full names of all imports, also those inside functions."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      keep = len(module.split('.')) - node.level + is_package
      above = module.split('.')[:keep] if node.level else []
      base = [*above, *([node.module] if node.module else [])]
      yield from ('.'.join([*base, alias.name]) for alias in node.names)


def _layer(name: str) -> tuple[int, str] | None:
  """Returns index and name of the layer's entry for a library module's name."""
  if name == 'specsample':
    return len(_LAYERS) - 1, ''
  matches = [
    (len(entry), index, entry)
    for index, entries in enumerate(_LAYERS)
    for entry in entries
    if entry and f'{name}.'.startswith(f'specsample.{entry}.')
  ]
  return max(matches)[1:] if matches else None


def _violations(module: str, source: str, is_package=False) -> list[str]:
  """Returns complaints about imports that a library module may not have."""
  own = _layer(module)
  if own is None:
    return [f'{module} has no place in _LAYERS: give it one']
  found = []
  for name in _imports(module, source, is_package):
    package = name.split('.')[0]
    if package in _ONLY_OUTSIDE:
      found.append(f'{module} imports {name}, which the library does without')
    if package != 'specsample':
      continue
    target = _layer(name)
    if target is None:
      found.append(f'{module} imports {name}: import the module it is from')
    elif own[1].startswith('loop.') and not (
      target[1].startswith('loop.') or target[1] in _LOOP_IMPORTS
    ):
      found.append(f'{module} imports {name}, but is to work with any')
    elif target[0] > own[0] or (
      target[0] == own[0] and name.split('.')[1] != module.split('.')[1]
    ):
      found.append(f'{module} imports {name} of a layer that is not below it')
  return found


@pytest.mark.parametrize('module', _LIBRARY)
def test_modules_import_lower_layers_only(module):
  path = _FILES[module]
  is_package = path.name == '__init__.py'
  violations = _violations(module, path.read_text('utf-8'), is_package)
  assert not violations


def _of_higher_floors(module: str, source: str) -> list[str]:
  """Returns the imports that a module of an experiments folder may not have."""
  floor = {name: i for i, names in enumerate(_FLOORS) for name in names}
  own = module.split('.')[1]
  found = []
  for name in _imports(module, source, False):
    parts = name.split('.')
    if parts[0] != 'experiments' or parts[1:2] == [own]:
      continue
    if parts[1] not in floor or floor[parts[1]] >= floor[own]:
      found.append(name)
  return found


def test_folders_of_experiments_import_lower_floors_only():
  folders = set()
  for module, path in _FILES.items():
    parts = module.split('.')
    if parts[0] == 'experiments' and (path.stem == '__init__' or parts[2:]):
      folders |= {*parts[1:2]}
      found = parts[1:] and _of_higher_floors(module, path.read_text('utf-8'))
      assert not found, f'{module} imports {found}'
  assert folders == {name for names in _FLOORS for name in names}


@pytest.mark.parametrize(
  ('module', 'source', 'is_allowed'),
  [
    ('html_report.page', 'from experiments.evaluation import table', True),
    ('html_report.page', 'from experiments.html_report import views', True),
    ('evaluation.table', 'from experiments.html_report import page', False),
    ('command.cli', 'def f():\n  from experiments import methods', False),
    ('evaluation.table', 'from experiments import evaluate', False),
  ],
)
def test_an_import_of_a_higher_floor_is_found(module, source, is_allowed):
  found = _of_higher_floors(f'experiments.{module}', source)
  assert bool(found) is not is_allowed


def test_every_part_of_the_core_was_read():
  core = 'types sampling streams stats loop.decode verify drafters models'
  assert {f'specsample.{part}' for part in core.split()} <= set(_LIBRARY)
  assert any(name.startswith('experiments.') for name in _FILES)


def test_sharding_alone_names_the_axes_of_a_mesh():
  users = {
    module
    for module, path in _FILES.items()
    if any(name in path.read_text('utf-8') for name in _OF_A_MESH)
  }
  assert users == {'specsample.sharding'}


def test_figures_alone_imports_matplotlib():
  users = {
    module
    for module, path in _FILES.items()
    for name in _imports(module, path.read_text('utf-8'), False)
    if name.split('.')[0] == 'matplotlib'
  }
  assert users == {'experiments.reporting.figures'}


def test_no_import_is_circular():
  graph = {}
  for module, path in _FILES.items():
    names = _imports(module, path.read_text('utf-8'), path.stem == '__init__')
    # `from specsample.types import Array` names an object of a module.
    graph[module] = {
      name if name in _FILES else name.rpartition('.')[0] for name in names
    } & _FILES.keys()
  order = tuple(graphlib.TopologicalSorter(graph).static_order())
  assert len(order) == len(_FILES)


def test_experiments_do_not_import_tests():
  for module in _FILES.keys() - set(_LIBRARY):
    names = _imports(module, _FILES[module].read_text('utf-8'), False)
    assert not [name for name in names if name.split('.')[0] == 'tests']


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('loop.decode', 'from specsample.verify import chain'),
    ('loop.decode', 'from specsample.drafters.ngram import Ngram'),
    ('loop.decode', 'from specsample.models import cache'),
    ('loop.decode', 'from specsample import text'),
    ('loop.decode', 'from .. import verify'),
    ('types', 'from specsample import sampling'),
    ('streams', 'import specsample.sampling'),
    ('verify.chain', 'from specsample.models import layers'),
    ('verify.chain', 'from ..drafters import chain'),
    ('models.layers', 'from specsample.models import transformer'),
    ('models.transformer', 'from specsample import drafters'),
    ('drafters.ngram', 'from specsample.models import transformer'),
    ('drafters.ngram', 'from specsample.loop import decode'),
    ('drafters.ngram', 'def f():\n  from specsample.training import losses'),
    ('verify.block', 'from specsample import testing'),
    ('verify.block', 'import specsample'),
    ('verify.block', 'from specsample import Output'),
    ('brand_new', 'import jax'),
    ('text.tokenizer', 'import torch.nn'),
    ('text.tokenizer', 'def f():\n  from transformers import AutoTokenizer'),
    ('stats', 'from matplotlib import pyplot'),
    ('models.checkpoint', 'from absl import logging'),
    ('drafters.ngram', 'import gin'),
    ('loop.decode', 'if True:\n  import rich.progress as progress'),
    ('testing.hash_model', 'from experiments.command import cli'),
  ],
)
def test_a_forbidden_import_is_found(module, source):
  assert len(_violations(f'specsample.{module}', source)) == 1


@pytest.mark.parametrize(
  ('module', 'source'),
  [
    ('loop.decode', 'from specsample import sampling as s, streams, types'),
    ('loop.decode', 'from specsample.stats import tokens'),
    ('loop.decode', 'from ..types import Array'),
    ('sampling', 'from specsample import sharding'),
    ('verify.chain', 'from specsample.verify import rule'),
    ('verify.chain', 'from . import rule\nfrom ..types import Array'),
    ('models.transformer', 'from specsample.models import cache, layers'),
    ('drafters.medusa', 'from specsample.models import layers'),
    ('training.losses', 'from specsample.drafters.eagle import Eagle'),
    ('testing.tiny', 'from specsample.models.transformer import Llama'),
    ('text.tokenizer', 'import tokenizers\nimport richer'),
  ],
)
def test_an_allowed_import_is_not(module, source):
  assert not _violations(f'specsample.{module}', source)


def test_a_package_imports_its_own_modules():
  source = 'from .chain import chain\nfrom specsample.verify.block import block'
  assert not _violations('specsample.verify', source, is_package=True)
  assert _violations('specsample.verify', 'from ..decode import x', True)
