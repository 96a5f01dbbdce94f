"""Each known mistake is caught, by what does not alarm on the shipped code."""

import pytest

from experiments.certificate.planted import bugs


@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.alarm, planted


def test_all_known_mistakes_are_planted():
  # Those of chains, four of filters, seven of trees, two of drafters that
  # remember, one of drafters that learn.
  assert len(bugs.BUGS) == 22 + 4 + 7 + 2 + 1
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
