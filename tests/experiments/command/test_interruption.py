"""Ctrl-C in the middle of another library, and twice."""

import subprocess
import sys
import textwrap

import pytest

_BEGIN = """
import os
import signal
from experiments.command import cli
from experiments.command import progress

def press():
  os.kill(os.getpid(), signal.SIGINT)
  for _ in range(1000):  # where Python handles signals
    pass
"""
_SWALLOWED = """
class Other:
  def __del__(self):
    press()

def main():
  with progress.bar(2) as step:
    step('first')
    Other()
    step('second')
    print('went on')
"""
_TWICE = """
def main():
  try:
    press()
  except KeyboardInterrupt:
    press()
    print('told what there is so far')
    raise
"""


@pytest.mark.parametrize(
  ('main', 'said'),
  [(_SWALLOWED, ''), (_TWICE, 'told what there is so far\n')],
)
def test_a_command_ends_once_and_in_order(main, said):
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_BEGIN + main) + '\ncli.run(main)'],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 130, done.stderr
  assert done.stdout == said
  assert done.stderr.splitlines()[-1] == 'interrupted'
