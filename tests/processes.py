"""Runs tests in their own processes, as XLA reads its flags once, on start."""

from collections.abc import Sequence
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
EIGHT_DEVICES = '--xla_force_host_platform_device_count=8'


def check(
  tests: Sequence[str | pathlib.Path],
  *flags: str,
  config: pytest.Config | None = None,
) -> None:
  """Runs tests with XLA's flags; shows their output if one fails.

  Args:
    tests: files or names of tests, from the root on.
    flags: all of XLA's flags.
    config: that of the run, whose slow and nightly tests run there as well.
  """
  options = ('--all', '--nightly') if config else ()
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider'),
      *('-p', 'no:xdist', '-o', 'python_files=check_*.py test_*.py'),
      *(option for option in options if config.getoption(option)),
      *tests,
    ],
    env=os.environ | {'XLA_FLAGS': ' '.join(flags)},
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  # All tests of a file may be slow or nightly.
  none_now = done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
  passed = done.returncode == 0 or (none_now and ' deselected' in done.stdout)
  assert passed, done.stdout + done.stderr
