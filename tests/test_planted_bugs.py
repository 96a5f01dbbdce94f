"""Each known mistake is caught by a check that passes on the shipped code."""

import pytest

from experiments.certificate.planted import bugs
from experiments.certificate.planted import detectors
from experiments.certificate.planted import rules
from specsample.drafters import Ngram


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


@pytest.mark.parametrize(
  'drafter', [detectors.CHAIN, Ngram(num_draft_tokens=2, min_ngram=1)]
)
def test_drafts_kept_if_they_equal_the_targets_draw_are_exact(drafter):
  reading = detectors.enumerated(rules.Equality(), drafter)
  assert not reading.alarm, reading


def test_a_comparison_at_zero_is_seen_only_if_a_probability_is_zero():
  reading = detectors.enumerated(rules.AcceptsAtZero())
  assert not reading.alarm, reading


def test_all_known_mistakes_are_planted():
  # 33 mistakes in chains, four in filters, ten in trees, two in drafters that
  # remember, one in drafters that learn, one in constraints, seven in `warp`,
  # three in bounds.
  assert len(bugs.BUGS) == 33 + 4 + 10 + 2 + 1 + 1 + 7 + 3
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
