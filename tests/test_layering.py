"""Imports follow the contracts of pyproject.toml, as import-linter checks."""

import pathlib
import shutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_LINT = 'from importlinter import cli; cli.lint_imports_command()'


def _lint(folder):
  """Returns import-linter's report on the packages in a folder."""
  ran = subprocess.run(
    [sys.executable, '-c', _LINT, '--no-cache'],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
    env={'PYTHONPATH': str(folder), 'TERM': 'dumb'},
  )
  return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
  """The packages with an import that breaks each of the contracts."""
  folder = tmp_path_factory.mktemp('copy')
  shutil.copy(_ROOT / 'pyproject.toml', folder)
  for package in ('specsample', 'experiments'):
    shutil.copytree(_ROOT / package, folder / package)
  for path, line in (
    ('specsample/verify/chain.py', 'from specsample.drafters import ngram'),
    ('specsample/models/layers.py', 'import specsample.models.transformer'),
    ('specsample/loop/decode.py', 'from specsample.verify import chain'),
    ('specsample/stats.py', 'def f():\n  import torch'),
    ('experiments/command/cli.py', 'from experiments.methods import method'),
    ('experiments/timing/roofline.py', 'import matplotlib.pyplot'),
  ):
    with (folder / path).open('a') as file:
      file.write(f'\n{line}\n')
  return folder


def test_imports_follow_the_contracts():
  status, report = _lint(_ROOT)
  assert status == 0, report
  assert '6 kept, 0 broken' in report


def test_import_that_breaks_a_contract_is_found(copy):
  status, report = _lint(copy)
  assert status == 1
  assert '0 kept, 6 broken' in report, report


def test_sharding_alone_names_the_axes_of_a_mesh():
  names = ('PartitionSpec', 'NamedSharding', 'shard_map')
  users = {
    path.relative_to(_ROOT).as_posix()
    for package in ('specsample', 'experiments')
    for path in (_ROOT / package).rglob('*.py')
    if any(name in path.read_text('utf-8') for name in names)
  }
  assert users == {'specsample/sharding.py'}
