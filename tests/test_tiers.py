"""The files of nightly tests exist; conftest.py checks the tests' names."""

import pathlib

import pytest

from tests import tiers

_TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize('file', sorted({x.file for x in tiers.NIGHTS}))
def test_the_file_is_there(file):
  assert (_TESTS / file).is_file()


def test_a_pattern_that_fits_nothing_is_found():
  night = next(x for x in tiers.NIGHTS if x.but)
  assert tiers.that_fit_nothing(['another.py::test']) == []
  found = tiers.that_fit_nothing([f'{night.file}::test'])
  assert night.tests in found
  assert set(night.but) <= set(found)


def test_every_test_has_one_time_of_day():
  night = next(x for x in tiers.NIGHTS if not x.but)
  for name in (night.tests.replace('*', 'x'), 'test_tree.py::test'):
    assert tiers.is_of(True, name) != tiers.is_of(False, name)
