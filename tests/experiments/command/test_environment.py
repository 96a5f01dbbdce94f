"""The JAX settings that commands make first, and what they must find."""

import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.command import environment
import specsample
from specsample import host
from specsample.testing.hash_model import HashModel

_VARIABLE = 'JAX_DEFAULT_MATMUL_PRECISION'
_MIN_SECONDS = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'
_SET = (
  'jax_compilation_cache_dir',
  'jax_persistent_cache_min_compile_time_secs',
  'jax_default_matmul_precision',
)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
  """Restores JAX's settings after each test."""
  monkeypatch.delenv(_VARIABLE, raising=False)
  monkeypatch.delenv(_MIN_SECONDS, raising=False)
  before = {name: getattr(jax.config, name) for name in _SET}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def _product():
  """Returns the program that multiplies two float32 matrices, as text."""
  matrix = jax.ShapeDtypeStruct((2, 2), jnp.float32)
  return jax.jit(lambda x, y: x @ y).lower(matrix, matrix).as_text()


def test_float32_is_multiplied_with_all_of_its_bits():
  jax.config.update('jax_default_matmul_precision', None)
  assert 'HIGHEST' not in _product()
  environment.set_up()
  assert 'precision = [HIGHEST, HIGHEST]' in _product()
  assert environment.hardware()['matmul_precision'] == 'highest'


def test_the_digest_of_the_code_is_that_of_every_file(tmp_path):
  (tmp_path / 'part').mkdir()
  one, other = tmp_path / 'one.py', tmp_path / 'part' / 'other.py'
  digests = []
  for path, text in ((one, 'a'), (other, 'a'), (other, 'b'), (other, 'a')):
    path.write_text(text)
    digests.append(host.source(tmp_path))
  other.rename(tmp_path / 'part' / 'renamed.py')
  digests.append(host.source(tmp_path))
  (tmp_path / 'notes.txt').write_text('no code')
  assert host.source(tmp_path) == digests[-1]
  assert digests[1] == digests[3]
  assert len(set(digests)) == 4
  assert environment.source() not in digests


def test_a_drafter_of_ones_own_is_part_of_the_code(tmp_path, monkeypatch):
  path = tmp_path / 'mine_alone.py'
  path.write_text(
    'import dataclasses\n'
    'from specsample.drafters import none\n'
    '@dataclasses.dataclass(frozen=True)\n'
    'class Mine(none.NoDraft): pass\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  mine = importlib.import_module('mine_alone').Mine()
  recorded = specsample.drafters.Recording(
    drafter=mine, model=HashModel(vocab_size=2)
  )
  digests = environment.source_beside(recorded)
  assert environment.source_beside(mine) == digests
  # As policies are, in a tuple.
  assert environment.source_beside(([mine],)) == digests
  assert digests.keys() == {'mine_alone'}
  path.write_text(path.read_text() + '\n')
  assert environment.source_beside(recorded) != digests
  assert environment.source_beside(specsample.drafters.NoDraft()) == {}


def test_the_variable_decides_where_it_is_set(monkeypatch):
  # As JAX does when it reads the variable on import.
  monkeypatch.setenv(_VARIABLE, 'tensorfloat32')
  jax.config.update('jax_default_matmul_precision', 'tensorfloat32')
  environment.set_up()
  assert 'HIGHEST' not in _product()
  assert environment.hardware()['matmul_precision'] == 'tensorfloat32'


def test_the_variable_decides_which_programs_are_kept(monkeypatch):
  name = 'jax_persistent_cache_min_compile_time_secs'
  jax.config.update(name, 3.0)
  environment.set_up()
  assert getattr(jax.config, name) == 0.1
  monkeypatch.setenv(_MIN_SECONDS, '3')
  jax.config.update(name, 3.0)
  environment.set_up()
  assert getattr(jax.config, name) == 3.0


@pytest.mark.parametrize(
  ('flags', 'code', 'line'),
  [
    # Without the packages of the environment, as the system's Python.
    (
      ('-S',),
      'import experiments',
      ' has no absl: use .venv/bin/python, which ./run.sh makes, or pip '
      "install '.[experiments]' in the repository",
    ),
    (
      (),
      'import sys; sys.version_info = (3, 10, 13); import experiments',
      'this is Python 3.10, and specsample needs 3.11 or newer: use '
      '.venv/bin/python, which ./run.sh makes, or another environment',
    ),
  ],
)
def test_a_lack_is_one_line(flags, code, line):
  done = subprocess.run(
    [sys.executable, *flags, '-c', code],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  (printed,) = done.stderr.splitlines()
  assert printed.endswith(line)
