"""Each known mistake is caught by a check that passes on the shipped code."""

import pytest

from experiments.certificate.planted import bugs
from experiments.certificate.planted import detectors


@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.statistic > planted.threshold, planted  # not NaN


@pytest.mark.parametrize('bug', bugs.IN_WARP, ids=lambda bug: bug.name)
def test_a_mistake_in_warp_is_not_seen_against_warp_itself(bug):
  warp = bug.planted.keywords['warp']
  assert not detectors.warped_alike(warp).alarm


def test_all_known_mistakes_are_planted():
  # 22 mistakes in chains, four in filters, eight in trees, two in drafters that
  # remember, one in drafters that learn, one in constraints, seven in `warp`,
  # three in bounds.
  assert len(bugs.BUGS) == 22 + 4 + 8 + 2 + 1 + 1 + 7 + 3
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
