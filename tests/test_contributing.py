"""Each drafter of the library is where CONTRIBUTING.md says."""

import inspect
import pathlib
import re

import pytest

from specsample import drafters
from specsample import testing
from specsample.drafters import trainable
from specsample.testing import trained

_ROOT = pathlib.Path(__file__).parents[1]
_TRAINED = [
  name
  for name in drafters.__all__
  if issubclass(getattr(drafters, name), trainable.Trainable)
]
_SHORT = {'DraftModel': 'draft', 'NoDraft': 'autoregressive'}
# They draft with another drafter, with any model, or what the host gives them.
_NO_GIN_FILE = (
  *('Adaptive', 'DynamicTree', 'LatticeTree', 'Recording', 'Tree'),
  *('Chain', 'Given', 'NgramTree'),
)

_GIN = 'configs/drafters.gin'


def _text(*path):
  return _ROOT.joinpath(*path).read_text('utf-8')


@pytest.mark.parametrize('name', drafters.__all__)
def test_it_has_a_test_and_a_row(name):
  tests = _ROOT.glob('tests/drafters/test_*.py')
  texts = [path.read_text('utf-8') for path in tests]
  if name != 'NoDraft':  # the baseline of them all
    assert any(f'drafters.{name}(' in text for text in texts)
  if name != 'Given':
    module = pathlib.Path(inspect.getfile(getattr(drafters, name))).name
    rows = [x for x in _text('README.md').splitlines() if x.startswith('| `')]
    assert any(f'`{name}`' in row and f'`{module}`' in row for row in rows)


@pytest.mark.parametrize('name', sorted({*drafters.__all__} - {*_NO_GIN_FILE}))
def test_it_has_a_gin_file(name):
  short = _SHORT.get(name, name.lower())
  assert re.search(rf'^{short}/|^methods.{short}\.', _text(_GIN), re.MULTILINE)


def test_every_trained_drafter_is_among_the_cases():
  target = testing.tiny_llama(vocab_size=6)
  made = {type(kind.make(target, 2, 3)).__name__ for kind in trained.CASES}
  assert made == set(_TRAINED)


@pytest.mark.parametrize(
  'reader',
  [
    'tests/on_8_devices/check_generate.py',
    'tests/on_8_devices/check_trees.py',
    'tests/drafters/test_adaptive.py',
    'tests/drafters/test_tree.py',
  ],
)
def test_the_cases_are_read_by(reader):
  assert 'in trained.CASES' in _text(reader)


def test_the_certificate_has_every_case():
  names = [scene.name for scene in trained.scenes(vocab_size=3)]
  assert names == [kind.name for kind in trained.CASES]
  for path in (
    'specsample/testing/cases.py',
    'experiments/certificate/sampled_cases.py',
  ):
    assert 'trained.scenes(' in _text(path)
