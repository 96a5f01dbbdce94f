"""Each known mistake is caught, by what does not alarm on the shipped code."""

import pytest

from experiments.planted import bugs


@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.alarm, planted


def test_all_known_mistakes_are_planted_or_do_not_apply():
  # Those that a chain can have, and those that wait for trees and beams.
  assert len(bugs.BUGS) == 19
  assert len(bugs.NOT_APPLICABLE) == 2
  names = [bug.name for bug in bugs.BUGS] + list(bugs.NOT_APPLICABLE)
  assert len(set(names)) == len(names)
