"""The joint law of two rows, against numbers worked out by hand."""

import numpy as np
import pytest

from experiments.certificate.planted import drafters as planted
from experiments.certificate.planted import policies as planted_policies
from specsample import policies
from specsample import verify
from specsample.drafters import Chain
from specsample.testing import pairs

_CHAIN = Chain(model=planted_policies.DRAFT, num_draft_tokens=1)
_CUT = planted.Changed(drafter=_CHAIN, change=planted.cut_by_neighbour)
# Both rows go on if one token in each promises enough for its cost.
_TOGETHER = planted_policies.drafter(
  policies.EarlyStopping(costs=(1, 5 / 3, 2), whole_batch=True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('drafter', 'expected'),
  [
    (_CHAIN, [[0.49, 0.21], [0.21, 0.09]]),
    (_TOGETHER, [[0.49, 0.21], [0.21, 0.09]]),
    (_CUT, [[0.5125, 0.1875], [0.1875, 0.1125]]),
  ],
)
def test_both_rows_have_the_targets_law_if_one_cuts_the_others_draft(
  drafter, expected
):
  """Target (.7, .3), draft (.5, .5), one draft token per row.

  If both rows draw A, both keep it. If both draw B, neither has a draft. If one
  of them draws B, only it has a draft, and it emits A with .4, the other with
  .7. So P(A, A) = (1 + .49 + 2 * .28) / 4.
  """
  law = pairs.joint_law(
    verify.chain,
    drafter,
    model=planted_policies.TARGET,
    draft_model=planted_policies.DRAFT,
    prompt=(1, 0, 1),
    rounds=1,
  )
  np.testing.assert_allclose(law, expected, atol=1e-6)
  np.testing.assert_allclose(law.sum(axis=0), [0.7, 0.3], atol=1e-6)
  np.testing.assert_allclose(law.sum(axis=1), [0.7, 0.3], atol=1e-6)
