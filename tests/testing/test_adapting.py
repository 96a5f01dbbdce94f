"""The scenes in which a drafter learns do let it learn and draft."""

import jax
import numpy as np
import pytest

import specsample
from specsample import verify
from specsample.testing import adapting
from specsample.training import online

_SCENES = {name: scene for name, *scene in adapting.scenes()}


@pytest.mark.slow
@pytest.mark.parametrize('name', _SCENES)
def test_updates_are_taken_and_drafts_are_kept(name):
  learner, params = _SCENES[name]
  output, _, reports = online.generate(
    online.init(params, learner),
    *specsample.pad_prompts([[1, 0, 1]] * 8),
    jax.random.key(0),
    learner=learner,
    model=learner.objective.target,
    verify=verify.chain,
    sampling=specsample.Sampling(temperature=1.0),
    max_new_tokens=12,
  )
  assert all(report['is_finite'] for report in reports)
  changed = [
    abs(np.log(report['loss_after'] / report['loss']))
    for report in reports
    if report['recorded']
  ]
  assert np.mean(changed) > 0.2
  drafts = np.arange(3)
  share = (output.accepted @ drafts).sum() / (output.proposed @ drafts).sum()
  assert 0.2 < share < 0.9
