"""A user's install: the wheel, its dependencies, and the files README names."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import jax
from packaging import requirements
from packaging import utils
import pytest

import specsample
from specsample import testing

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PYPROJECT = tomllib.loads((_ROOT / 'pyproject.toml').read_text('utf-8'))
_PROJECT = _PYPROJECT['project']


def _run(*command, **kwargs) -> str:
  environment = os.environ | {'PYTHONPATH': '', 'PYTHONSAFEPATH': '1'}
  result = subprocess.run(
    [str(argument) for argument in command],
    env=environment | kwargs.pop('env', {}),
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    check=False,
    **kwargs,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


def _target_and_medusa():
  model = testing.tiny_llama()
  target = specsample.Loaded(model, model.init(jax.random.key(0)), None)
  medusa = specsample.drafters.Medusa(model=model, num_draft_tokens=2)
  return target, medusa


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> pathlib.Path:
  # Build from a copy, to leave nothing behind in the working tree.
  source = tmp_path_factory.mktemp('source')
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(_ROOT / name, source)
  ignore = shutil.ignore_patterns('__pycache__')
  for name in ('specsample', 'checkpoints', 'experiments', 'tests'):
    shutil.copytree(_ROOT / name, source / name, ignore=ignore)
  target, drafter = _target_and_medusa()
  specsample.save_drafter(
    source / 'checkpoints' / 'tiny-llama' / 'medusa',
    drafter,
    drafter.init_params(jax.random.key(1)),
    target=target,
    card={},
  )
  target = tmp_path_factory.mktemp('wheel')
  pip = (sys.executable, '-m', 'pip', '--disable-pip-version-check', 'wheel')
  options = ('--no-build-isolation', '--no-deps', '--no-index')
  _run(*pip, *options, '--wheel-dir', target, source)
  (built,) = target.glob('*.whl')
  return built


@pytest.mark.slow
def test_wheel_holds_the_library_and_nothing_else(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  assert {'specsample/__init__.py', 'specsample/py.typed'} <= names
  packages = {name.split('/')[0] for name in names}
  info = f'specsample-{_PROJECT["version"]}.dist-info'
  assert packages == {'specsample', info}
  assert f'{info}/licenses/LICENSE' in names
  sources = (_ROOT / 'specsample').rglob('*.py')
  assert {path.relative_to(_ROOT).as_posix() for path in sources} <= names
  shipped = [p for p in (_ROOT / 'checkpoints').rglob('*') if p.is_file()]
  assert {
    f'specsample/{path.relative_to(_ROOT).as_posix()}' for path in shipped
  } <= names


# Imports every module of the installed library, while blocking all imports that
# a plain `pip install specsample` would not have installed, and then loads a
# drafter that the wheel has.
_IN_INSTALLED = """
import importlib, pathlib, pkgutil, sys

target, blocked = sys.argv[1], set(sys.argv[2:])

class Block:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in blocked:
      raise ModuleNotFoundError(f'blocked: {name}', name=name)

sys.meta_path.insert(0, Block())
sys.path.insert(0, target)
import specsample
assert pathlib.Path(specsample.__file__).is_relative_to(target), specsample
for module in pkgutil.walk_packages(specsample.__path__, 'specsample.'):
  importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith('specsample.')]))

import jax
model = specsample.testing.tiny_llama()
loaded = specsample.Loaded(model, model.init(jax.random.key(0)), None)
print(specsample.load_drafter('tiny-llama/medusa', loaded))
"""


@pytest.mark.slow
def test_wheel_works_without_the_extras(wheel, tmp_path):
  pip = (sys.executable, '-m', 'pip', '--disable-pip-version-check', 'install')
  _run(*pip, '--no-deps', '--no-index', '--target', tmp_path, wheel)
  needed = _closure(_PROJECT['dependencies'])
  blocked = [
    package
    for package, owners in importlib.metadata.packages_distributions().items()
    if needed.isdisjoint(map(utils.canonicalize_name, owners))
    and package != 'specsample'
  ]
  assert {'gin', 'matplotlib', 'torch', 'transformers'} <= set(blocked)
  output = _run(
    *(sys.executable, '-c', _IN_INSTALLED, tmp_path, *blocked),
    cwd=tmp_path,
    env={'JAX_PLATFORMS': 'cpu'},
  )
  *_, count, drafter = output.splitlines()
  modules = list((_ROOT / 'specsample').rglob('*.py'))
  assert int(count) == len(modules) - 1  # all but the package
  _, medusa = _target_and_medusa()
  assert drafter == f'LoadedDrafter(drafter={medusa})'


def _closure(roots: list[str]) -> set[str]:
  """Returns the names of the distributions that installing `roots` installs."""
  found = set()
  pending = [(root, '') for root in roots]
  while pending:
    text, extra = pending.pop()
    requirement = requirements.Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({'extra': extra}):
      continue
    name = utils.canonicalize_name(requirement.name)
    for wanted in {'', *requirement.extras} - {
      e for n, e in found if n == name
    }:
      found.add((name, wanted))
      requires = importlib.metadata.requires(name) or []
      pending.extend((text, wanted) for text in requires)
  return {name for name, _ in found}


def _imported_distributions(package: str) -> set[str]:
  owners = importlib.metadata.packages_distributions()
  names = set()
  for path in (_ROOT / package).rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      if isinstance(node, ast.Import):
        names |= {alias.name.split('.')[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and not node.level:
        names.add((node.module or '').split('.')[0])
  # The tests import modules of their own folders by name.
  own = {'tests', *(path.stem for path in (_ROOT / 'tests').rglob('*.py'))}
  names -= {*sys.stdlib_module_names, 'specsample', 'experiments', *own}
  return {utils.canonicalize_name(owners[name][0]) for name in names}


def _names(listed: list[str]) -> set[str]:
  parsed = [requirements.Requirement(text) for text in listed]
  return {utils.canonicalize_name(requirement.name) for requirement in parsed}


def test_dependencies_are_what_the_library_imports():
  assert _imported_distributions('specsample') == _names(
    _PROJECT['dependencies']
  )


@pytest.mark.parametrize('package', ['experiments', 'tests'])
def test_declared_packages_alone_are_imported(package):
  extras = _PROJECT['optional-dependencies']
  names = ['experiments', 'data', 'tensorboard', 'test']
  declared = _PROJECT['dependencies'] + [
    x for name in names for x in extras[name]
  ]
  assert _imported_distributions(package) <= _names(declared)


def test_citation_and_changelog_are_of_this_version():
  text = (_ROOT / 'CITATION.cff').read_text('utf-8')
  fields = dict(re.findall(r'^([a-z-]+): *(.*)$', text, re.MULTILINE))
  assert fields['version'] == _PROJECT['version']
  assert fields['license'] == _PROJECT['license']
  address = fields['repository-code'].strip('"')
  assert address == _PROJECT['urls']['Repository']
  assert {'cff-version', 'title', 'message', 'authors'} <= fields.keys()
  text = (_ROOT / 'CHANGELOG.md').read_text('utf-8')
  first = re.search(r'^## (\S+)( \(unreleased\))?$', text, re.MULTILINE)
  assert first and first[1] == _PROJECT['version']


@pytest.mark.parametrize('name', ['run.sh', 'test.sh', '.ci/run'])
def test_scripts_are_executable_and_parse(name):
  assert os.access(_ROOT / name, os.X_OK)
  _run('bash', '-n', _ROOT / name)
