"""Samples of the compiled loop: how they are mixed, counted and compared."""

import dataclasses

import jax
import numpy as np
import pytest

from specsample import drafters
from specsample import verify
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import conditional
from specsample.testing import Group
from specsample.testing import HashModel
from specsample.testing import proposal
from specsample.testing import sample as sample_lib

_MODEL = HashModel(vocab_size=3)
_GROUPS = (
  Group((1, 0, 1), Sampling(temperature=1.0)),
  Group((2,), Sampling(temperature=0.0)),
)


@pytest.fixture(scope='module')
def sample():
  return sample_lib.draw(
    Decoder(
      _MODEL,
      drafters.Chain(
        model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=1
      ),
      verify.chain,
    ),
    {'target': {}, 'drafter': {}},
    _GROUPS,
    jax.random.key(1),
    num_tokens=4,
    num_rows=10_000,
  )


def test_settings_that_are_left_out_are_neutral():
  mixed = sample_lib.mix(
    [Sampling(temperature=0.5, top_p=0.9), Sampling(repetition_penalty=2.0)]
  )
  np.testing.assert_array_equal(mixed.temperature, [0.5, 0])
  np.testing.assert_array_equal(mixed.top_p, [0.9, 1])
  np.testing.assert_array_equal(mixed.repetition_penalty, [1, 2])
  assert mixed.top_k is None
  bias = np.asarray([0, -1, 2])
  mixed = sample_lib.mix([Sampling(), Sampling(logit_bias=bias)])
  np.testing.assert_array_equal(mixed.logit_bias, [[0, 0, 0], bias])


@pytest.mark.slow
def test_rows_are_those_of_their_group(sample):
  assert sample.tokens.shape == (3 * 4096, 4)
  greedy = sample.of_group(1).tokens
  assert (greedy == greedy[0]).all()
  assert len(np.unique(sample.of_group(0).tokens, axis=0)) > 60


def test_rounds_are_told_apart(sample):
  # Four tokens in rounds of one or two, the last cut to what remains.
  assert sample.accepted[:, :2].max() == 1
  both = (sample.accepted[:, :2] == 1).all(axis=1)
  assert (sample.accepted[both, 2:] == 0).all()
  assert 0 < both.mean() < 1


def test_a_law_off_by_little_is_noticed(sample):
  laws = sample_lib.laws(_MODEL, {}, _GROUPS, 4)
  result = sample_lib.compare(sample, laws)
  assert result.passed
  other = dataclasses.replace(_MODEL, scale=3.5)
  assert not sample_lib.compare(
    sample, sample_lib.laws(other, {}, _GROUPS, 4)
  ).passed


def test_a_row_that_stopped_is_no_string_of_the_law():
  tokens = np.asarray([[0, 0], [0, -1]])
  stopped = sample_lib.Sample(tokens, np.zeros((2, 2), int), num_groups=1)
  law = np.eye(9)[0]
  assert sample_lib.compare(stopped, [law], eos_id=0).passed
  assert not sample_lib.compare(stopped, [law]).passed


@pytest.mark.parametrize(
  'nothing', [{'groups': ()}, {'num_rows': 0}, {'num_tokens': 0}]
)
def test_an_empty_sample_is_refused(nothing):
  settings = {'groups': _GROUPS, 'num_rows': 1, 'num_tokens': 1} | nothing
  with pytest.raises(ValueError, match='give at least one of each'):
    sample_lib.draw(
      Decoder(_MODEL, drafters.NoDraft(), verify.chain),
      {},
      key=jax.random.key(0),
      **settings,
    )


def test_acceptance_off_by_little_is_noticed(sample):
  laws = []
  for group in _GROUPS:
    target, draft = (
      conditional.from_model(model, {}, group.prompt, group.sampling)
      for model in (_MODEL, dataclasses.replace(_MODEL, noise=0.5))
    )
    at_least = acceptance.tree(proposal.sampled(draft, 1), target)
    laws.append(acceptance.law(at_least))
  result = sample_lib.acceptance(sample, laws)
  assert result.passed
  assert 0 < result.error < 0.01
  off = [law + np.asarray([0.1, -0.1]) * (law < 1).all() for law in laws]
  assert not sample_lib.acceptance(sample, off).passed
