"""Each known mistake is caught, by what does not alarm on the shipped code."""

import pytest

from experiments.planted import bugs


@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.alarm, planted


def test_all_known_mistakes_are_planted():
<<<<<<< HEAD
  # Those of chains, and five of trees.
  assert len(bugs.BUGS) == 20 + 5
=======
  # Those of chains, five of trees, and one of drafters that learn.
  assert len(bugs.BUGS) == 19 + 5 + 1
>>>>>>> online
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
