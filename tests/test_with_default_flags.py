"""Tests of the executables that users run.

test.sh makes XLA compile fast; here it compiles with its default flags.
"""

import pathlib

import pytest

from tests import processes

_FOLDER = pathlib.Path(__file__).parent / 'with_default_flags'
_EVALUATE = 'tests/experiments/test_evaluate.py'
_MESHES = 'tests/on_8_devices/check_generate.py'


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', sorted(path.stem for path in _FOLDER.glob('check_*.py'))
)
def test_passes(name, request):
  processes.check([_FOLDER / f'{name}.py'], config=request.config)


@pytest.mark.nightly
def test_an_evaluation_passes():
  processes.check(
    [
      f'{_EVALUATE}::test_greedy_tokens_are_those_of_the_library',
      f'{_EVALUATE}::test_terminal_gets_the_table_and_the_comparison',
    ]
  )


@pytest.mark.nightly
def test_a_mesh_passes():
  processes.check(
    [f'{_MESHES}::test_noise_of_a_position_is_that_of_one_device[eagle-3]'],
    processes.EIGHT_DEVICES,
  )
