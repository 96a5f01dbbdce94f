"""Each known mistake is caught by a check that passes on the shipped code."""

import numpy as np
import pytest

from experiments.certificate.planted import bugs
from experiments.certificate.planted import detectors
from experiments.certificate.planted import policies as planted_policies
from experiments.certificate.planted import rules
from specsample import policies
from specsample import verify
from specsample.drafters import Ngram
from specsample.testing import cases
from specsample.testing import conditional
from specsample.testing import drafted
from specsample.testing import enumerate as enumerate_lib
from tests import samplers


@pytest.mark.slow(
  but=(
    'rejected drafts left in a recurrent state',
    'residual = p instead of (p - q)+',
    'a draft that the target never emits accepted at u = 0',
    'the bonus token drawn after a rejection',
    'a constraint that does not follow the draft tokens',
    'siblings without replacement verified as independent ones',
  )
)
@pytest.mark.nightly(
  only=(
    'a recurrent state that always keeps the pending token',
    'a recurrent state rolled forward by at most three tokens',
    'the log of the row beside folded into a recurrent state',
    'a recurrent state that passes through the siblings of a node',
    'a recurrent state rounded to bfloat16',
    "noise of a rejected draft's position shared with the residual",
    'a filter by the probability of a path up to the token it leaves out',
    'a filter by the rank of the token that it leaves out',
    'siblings that were drawn pruned to the likeliest',
    'greedy rows mishandled in a mixed batch',
    'one length for all rows of a ragged batch',
    'penalties updated once a round instead of once a token',
    'penalties count nodes that are not on the path',
    'probability on padded vocabulary',
    'the best paths of a lattice treated as samples',
    'weights updated between the draw of a draft and its verdict',
    'log-probabilities of the policy before its last step',
    "a history that holds the row's own future",
  )
)
@pytest.mark.parametrize('bug', bugs.BUGS, ids=[bug.name for bug in bugs.BUGS])
def test_is_caught(bug):
  shipped = bug.shipped()
  assert not shipped.alarm, shipped
  planted = bug.planted()
  assert planted.statistic > planted.threshold, planted  # not NaN


@pytest.mark.parametrize('bug', bugs.IN_WARP, ids=lambda bug: bug.name)
def test_a_mistake_in_warp_is_not_seen_against_warp_itself(bug):
  enumeration, target, _ = detectors.everywhere(bug.mistake['warp'])
  error, _ = enumeration.error(2, target)
  assert error < 1e-12


@pytest.mark.parametrize(
  'drafter', [detectors.CHAIN, Ngram(num_draft_tokens=2, min_ngram=1)]
)
def test_drafts_kept_if_they_equal_the_targets_draw_are_exact(drafter):
  reading = detectors.enumerated(samplers.EQUALITY, drafter)
  assert not reading.alarm, reading


@pytest.mark.parametrize(
  ('budget', 'expected'),
  [
    # Never drafts.
    (policies.EarlyStopping(costs=planted_policies.COSTS), (0.7, 0.3)),
    # One token, or two after A.
    (policies.EarlyStopping(costs=(1, 5 / 3, 2)), (0.7, 0.3)),
    (planted_policies.GlobalArgmax(costs=planted_policies.COSTS), (0.85, 0.15)),
  ],
)
def test_a_budget_is_exact_if_it_stops_early(budget, expected):
  proposal = drafted.from_drafter(
    planted_policies.drafter(budget),
    {'target': {}, 'drafter': {}},
    planted_policies.TARGET,
    cases.PROMPT,
    rounds=1,
  )
  enumeration = enumerate_lib.Enumeration(
    verify.chain,
    proposal,
    conditional.from_model(planted_policies.TARGET, {}, cases.PROMPT),
  )
  first = enumeration.joint_law(1).reshape(2, -1).sum(axis=1)
  np.testing.assert_allclose(first, expected, atol=1e-7)


def test_a_comparison_at_zero_is_seen_only_if_a_probability_is_zero():
  reading = detectors.enumerated(rules.Rule(law=rules.accepts_at_zero))
  assert not reading.alarm, reading


def test_all_known_mistakes_are_planted():
  # 35 mistakes in chains, six in filters, 11 in trees, three in drafters that
  # remember, three in drafters with features, one in drafters that learn, one
  # in constraints, seven in `warp`, three in bounds, four in rollouts, nine in
  # recurrent states.
  assert len(bugs.BUGS) == 35 + 6 + 11 + 3 + 3 + 1 + 1 + 7 + 3 + 4 + 9
  names = [bug.name for bug in bugs.BUGS]
  assert len(set(names)) == len(names)
