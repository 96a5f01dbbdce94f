"""Each known mistake is caught by a check that passes on the shipped code."""

import pytest

from experiments.certificate.planted import bugs


@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.statistic > planted.threshold, planted  # not NaN


def test_all_known_mistakes_are_planted():
  # 22 mistakes in chains, four in filters, seven in trees, two in drafters that
  # remember, one in drafters that learn, one in constraints, three in bounds.
  assert len(bugs.BUGS) == 22 + 4 + 7 + 2 + 1 + 1 + 3
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
