"""Runs the files of tests/on_8_devices, in processes with 8 devices.

The number of devices is fixed when JAX starts, and a process of the ordinary
tests has one.
"""

import os
import pathlib

import pytest

from tests import processes

_FOLDER = pathlib.Path(__file__).parent / 'on_8_devices'
# Each group takes about as long as the others.
_GROUPS = {
  'chains': ('generate', 'continuous'),
  'trees': ('trees', 'divergence', 'compilation', 'certified'),
  'models': ('families', 'published', 'sharding', 'loading'),
  'commands': ('training', 'experiments', 'rollout'),
}


def test_every_file_is_of_a_group():
  found = sorted(path.name for path in _FOLDER.glob('check_*.py'))
  assert found == sorted(
    f'check_{name}.py' for group in _GROUPS.values() for name in group
  )


@pytest.mark.slow(only=('models',))
@pytest.mark.parametrize('group', _GROUPS)
def test_passes_on_8_devices(group, request):
  files = [_FOLDER / f'check_{name}.py' for name in _GROUPS[group]]
  flags = os.environ.get('XLA_FLAGS', '')
  processes.check(files, flags, processes.EIGHT_DEVICES, config=request.config)
