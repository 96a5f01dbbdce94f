"""The lines that breaks.py breaks exist; breaks.py itself is run by hand."""

import pathlib

import pytest

from tests import breaks

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize('name', breaks.BREAKS)
def test_the_line_is_there_once(name):
  fault = breaks.BREAKS[name]
  assert (_ROOT / fault.file).read_text('utf-8').count(fault.old) == 1
  assert all((_ROOT / path).exists() for path in fault.tests)
