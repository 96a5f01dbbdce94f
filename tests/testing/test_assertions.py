"""The shipped assertions pass what is right and find what is broken."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from experiments.planted import loop
from experiments.planted import rules
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import cases as cases_lib

_MODEL = testing.HashModel(vocab_size=16)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=3
)
_PARAMS = {'target': {}, 'drafter': {}}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % 16
_LENGTHS = np.asarray([6, 2, 5, 1])


def _run(assertion, *arguments, **changes):
  settings = {
    'model': _MODEL,
    'drafter': _CHAIN,
    'verify': verify.block,
    'max_new_tokens': 16,
  }
  assertion(_PARAMS, _PROMPTS, _LENGTHS, *arguments, **(settings | changes))


def test_exact():
  few = list(itertools.islice(cases_lib.standard_cases(), 8))
  testing.assert_exact(verify.block, few)
  testing.assert_exact(verify.coupled, few)  # its point masses
  with pytest.raises(AssertionError, match=r'plain, sampled, V = 2, K = 1'):
    testing.assert_exact(rules.PlainResidual(), few)


def test_follows_target():
  model = testing.HashModel(vocab_size=3)
  chain = drafters.Chain(
    model=dataclasses.replace(model, noise=0.5), num_draft_tokens=2
  )
  groups = (testing.Group((1, 2), Sampling(temperature=1.0)),)
  run = lambda rule: testing.assert_follows_target(
    _PARAMS,
    groups,
    jax.random.key(0),
    model=model,
    drafter=chain,
    verify=rule,
    num_rows=16384,
  )
  run(verify.block)
  with pytest.raises(AssertionError, match='does not follow the target'):
    run(rules.PlainResidual())


def test_greedy_equal():
  _run(testing.assert_greedy_equal)
  with pytest.raises(AssertionError, match='of 64 tokens'):
    _run(testing.assert_greedy_equal, verify=verify.Synthetic(rate=0.5))


def test_equals_plain_sampling():
  run = lambda rule: _run(
    testing.assert_equals_plain_sampling,
    jax.random.key(2),
    verify=rule,
    sampling=Sampling(temperature=1.0),
  )
  run(verify.coupled)
  # Exact, but under other random numbers.
  with pytest.raises(AssertionError, match='not those of plain sampling'):
    run(verify.chain)


def test_batch_invariant():
  mixed = Sampling(temperature=np.asarray([1.0, 0.0, 0.5, 1.5]))
  run = lambda **changes: _run(
    testing.assert_batch_invariant,
    jax.random.key(2),
    sampling=mixed,
    **changes,
  )
  run()
  with pytest.raises(AssertionError, match=r'tokens of rows \[\d\] .* alone'):
    run(model=loop.OneLength(vocab_size=16))
