"""SECURITY.md is right about what unpickles, executes and starts processes."""

import ast
from collections.abc import Iterator
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# What can run code, and the files that may use it.
_USERS = {
  'pickle': {'specsample/models/torch_file.py'},
  'exec': {'experiments/tasks/jail.py'},
  'eval': set(),
  'subprocess': {
    'experiments/command/environment.py',  # asks git for the commit
    'experiments/tasks/sandbox.py',
    'specsample/cpu/native.py',  # compiles our own C++
    'specsample/text/templates.py',  # renders chat templates in a sandbox
  },
}
# Modules that unpickle whatever they read.
_UNPICKLERS = {'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve'}


def _used(source: str) -> Iterator[str]:
  """Yields imported packages, called functions, and doubtful arguments."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name.split('.')[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield (node.module or '').split('.')[0]
    elif isinstance(node, ast.Call):
      yield ast.unparse(node.func)
      for keyword in node.keywords:
        is_false = ast.unparse(keyword.value) == 'False'
        if keyword.arg == 'allow_pickle' and not is_false:
          yield 'allow_pickle'
        if keyword.arg == 'trust_remote_code':
          yield 'trust_remote_code'


_USED = {
  path.relative_to(_ROOT).as_posix(): {*_used(path.read_text('utf-8'))}
  for package in ('specsample', 'experiments')
  for path in sorted((_ROOT / package).rglob('*.py'))
}


@pytest.mark.parametrize('name', _USERS)
def test_code_is_run_only_where_the_page_says(name):
  users = {path for path, used in _USED.items() if name in used}
  assert users == _USERS[name]


def test_nothing_else_unpickles_or_trusts_remote_code():
  forbidden = {'torch.load', 'allow_pickle', 'trust_remote_code', *_UNPICKLERS}
  for path, used in _USED.items():
    assert forbidden.isdisjoint(used), path


@pytest.mark.parametrize(
  ('source', 'found'),
  [
    ('import pickle', 'pickle'),
    ('def f():\n  from subprocess import run', 'subprocess'),
    ('eval(text)', 'eval'),
    ('x = torch.load(path)', 'torch.load'),
    ('np.load(path, allow_pickle=True)', 'allow_pickle'),
    ('f(trust_remote_code=trust)', 'trust_remote_code'),
  ],
)
def test_a_use_is_found(source, found):
  assert found in _used(source)
  assert found not in _used('np.load(path, allow_pickle=False)\njax.eval(x)')
