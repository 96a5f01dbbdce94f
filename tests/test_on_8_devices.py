"""Runs the files of tests/on_8_devices, each in a process with 8 devices.

The number of devices is fixed when JAX starts, so that a process of the
ordinary tests has one.
"""

import os
import pathlib
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(__file__).parent / 'on_8_devices'
_FILES = sorted(path.name for path in _FOLDER.glob('check_*.py'))
assert len(_FILES) >= 10, _FILES  # a folder that moved would test nothing


@pytest.mark.parametrize('file', _FILES)
def test_passes_on_8_devices(file):
  flags = [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
  ]
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider'),
      *('-p', 'no:xdist', '-o', 'python_files=check_*.py', _FOLDER / file),
    ],
    env=os.environ | {'XLA_FLAGS': ' '.join(flags)},
    cwd=_FOLDER.parents[1],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
