"""Commands say in one line that the environment lacks something."""

import subprocess
import sys

import pytest


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
