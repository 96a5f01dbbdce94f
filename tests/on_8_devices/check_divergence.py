"""An audit on a mesh reads the same as an audit on a single device."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.evaluation import divergence
import specsample
from specsample import sharding
from specsample import testing

_MODEL = dataclasses.replace(testing.tiny_llama(), dtype='bfloat16')
_BIAS = np.where(np.isin(np.arange(_MODEL.vocab_size), (7, 8)), 50, 0)
_PENALISED = specsample.Sampling(
  presence_penalty=1.0,
  repetition_penalty=1.2,
  logit_bias=_BIAS.astype(np.float32),
)


def _audit(params, sampling):
  return divergence.audit(
    params,
    *([3, 1, 4], [5, 7], 8, 7),
    model=_MODEL,
    width=3,
    batch_size=2,
    max_new_tokens=8,
    sampling=sampling,
  )


@pytest.mark.slow
@pytest.mark.parametrize('sampling', [specsample.Sampling(), _PENALISED])
def test_readings_are_those_of_one_device(sampling):
  params = _MODEL.init(jax.random.key(0))
  expected = _audit(params, sampling)
  with jax.set_mesh(sharding.make_mesh(4, 2)):
    found = _audit(sharding.place(params, _MODEL.param_axes()), sampling)
  assert found.is_tie == expected.is_tie
  assert found.bound == pytest.approx(expected.bound, rel=1e-4)
  assert found.float32.best == expected.float32.best
  assert found.float32.lead == pytest.approx(expected.float32.lead, abs=1e-4)
