"""Audits of samplers: laws known by hand, frameworks, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from experiments.certificate.planted import rules
from specsample import testing
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import auditing
from specsample.testing.hash_model import HashModel
from tests import samplers

_PLAIN = {'plain': Sampling(temperature=1.0)}
_MIXED = 'greedy and sampled rows'


def _audit(sampler, settings=_PLAIN, **options):
  return testing.audit(sampler, settings, **{'num_uniforms': 2} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'drafts'),
  [
    (verify.chain, auditing.drawn),
    (verify.chain, auditing.likeliest),
    (verify.block, auditing.drawn),
  ],
)
def test_exact_rules_follow_the_target_in_all_settings(rule, drafts):
  findings = _audit(samplers.of_rule(rule), auditing.SETTINGS, drafts=drafts)
  assert len(findings) == len(auditing.SETTINGS) + 1  # one has two rows
  for finding in findings:
    assert finding.follows_target and not finding.gives_away, str(finding)
    assert finding.law.sum() == pytest.approx(1)


def test_a_law_that_is_known_by_hand():
  # One of two tokens, of which the target draws each half of the time.
  sampler = lambda *given: (given[4] >= 0.75).astype(int)
  (finding,) = _audit(
    sampler,
    num_uniforms=1,
    model=HashModel(vocab_size=2, scale=0.0),
    drafts=auditing.no_drafts,
    num_before=0,
  )
  np.testing.assert_array_equal(finding.law, [0.75, 0.25])
  np.testing.assert_allclose(finding.target, [0.5, 0.5])
  assert finding.total_variation == pytest.approx(0.25)
  assert not finding.follows_target
  assert 'DIFFERS, total variation 0.25 (enumerated)' in str(finding)


@pytest.mark.slow
@pytest.mark.parametrize('sampler', [samplers.in_numpy, samplers.in_torch])
def test_numpy_and_torch_are_audited_as_jax_is(sampler):
  options = {'num_uniforms': 3, 'model': HashModel(vocab_size=2)}
  (finding,) = _audit(sampler, rows_per_call=64, **options)
  (expected,) = _audit(samplers.of_rule(verify.chain), **options)
  assert finding.follows_target, str(finding)
  np.testing.assert_allclose(finding.law, expected.law, atol=1e-6)
  assert finding.tokens_per_round == pytest.approx(expected.tokens_per_round)


@pytest.mark.slow
def test_a_sampled_law_is_near_the_enumerated_one():
  for rule in (verify.chain, rules.Rule(law=rules.plain_residual)):
    sampler = samplers.of_rule(rule)
    (exact,) = _audit(sampler)
    (found,) = _audit(
      samplers.with_key(sampler), num_uniforms=None, num_rows=16384
    )
    low, high = found.interval
    assert low <= exact.total_variation <= high < low + 0.11
    assert found.detectable < 0.06
    assert found.follows_target == exact.follows_target
    assert found.rows >= 16384
    assert found.tokens_per_round == pytest.approx(
      exact.tokens_per_round, abs=0.03
    )


def test_rows_that_share_their_random_numbers_are_found():
  sampler = samplers.of_rule(verify.chain)

  def shared(*given):
    uniforms = jax.random.uniform(given[4], (1, 2))
    return sampler(*given[:4], jnp.tile(uniforms, (len(given[0]), 1)))

  (finding,) = _audit(shared, num_uniforms=None, num_rows=4096)
  assert not finding.follows_target


def test_rows_are_greedy_and_sampled_in_one_call():
  right = samplers.of_rule(verify.chain)

  def batch_decides(tokens, probs, logits, sampling, uniforms):
    temperature = np.asarray(sampling.temperature)
    if temperature.any():
      temperature = np.where(temperature == 0, 1, temperature)
    sampling = dataclasses.replace(sampling, temperature=temperature)
    return right(tokens, probs, logits, sampling, uniforms)

  settings = {name: auditing.SETTINGS[name] for name in ('greedy', _MIXED)}
  greedy, beside, sampled = _audit(batch_decides, settings)
  assert greedy.follows_target and sampled.follows_target
  assert beside.sampling.temperature == 0
  assert beside.setting == _MIXED and not beside.follows_target


@pytest.mark.slow
def test_tokens_that_are_given_away_are_found_though_the_law_is_right():
  for rule in (samplers.EQUALITY, rules.Rule(law=rules.skipped_bonus)):
    sampler = samplers.of_rule(rule)
    (exact,) = _audit(sampler)
    (found,) = _audit(
      samplers.with_key(sampler), num_uniforms=None, num_rows=16384
    )
    for finding in (exact, found):
      assert finding.follows_target and finding.gives_away, str(finding)


_CHAIN = samplers.of_rule(verify.chain)


def _change(change):
  return lambda *given: change(np.array(_CHAIN(*given)))


def _put(column, token):
  def change(tokens):
    tokens[:, column] = token
    return tokens

  return _change(change)


@pytest.mark.parametrize(
  ('sampler', 'message'),
  [
    (_change(lambda x: x[:, :-1]), r'shape \(1024, 2\): return integers of sh'),
    (_change(lambda x: x[:7]), r'shape \(7, 3\): .*\(1024, 3\)'),
    (_change(lambda x: x.astype(float)), 'returned float64 of shape'),
    (
      _change(lambda x: [[y for y in row if y >= 0] for row in x.tolist()]),
      r'rows of several lengths: fill them up to \(1024, 3\) with -1',
    ),
    (_put(0, 4), 'one or more tokens from 0 to 3, then only -1'),
    (_put(0, -1), r'1024 rows such as \[-1, '),
    (_put(2, 0), 'then only -1'),
  ],
)
@pytest.mark.parametrize('num_uniforms', [2, None])
def test_what_is_no_sequence_of_tokens_is_refused(
  sampler, message, num_uniforms
):
  if num_uniforms is None:
    sampler = samplers.with_key(sampler)
  with pytest.raises(ValueError, match=message):
    _audit(sampler, num_uniforms=num_uniforms)


@pytest.mark.parametrize('num_uniforms', [2, None])
def test_global_randomness_is_found(num_uniforms):
  def sampler(*given):
    uniforms = np.random.random((len(given[0]), 2))
    return _CHAIN(*given[:4], uniforms.astype(np.float32))

  with pytest.raises(ValueError, match=r'with one key differ in \d+ of 1024 r'):
    _audit(sampler, num_uniforms=num_uniforms)


def test_a_generator_that_is_seeded_by_the_key_is_not_global():
  def sampler(*given):
    seed = int(jax.random.bits(given[4]))
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand((len(given[0]), 2), generator=generator)
    return _CHAIN(*given[:4], uniforms.numpy())

  (finding,) = _audit(sampler, num_uniforms=None, num_rows=4096)
  assert finding.follows_target


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_uniforms': 0}, 'num_uniforms is 0: give the number'),
    ({'num_rows': 100}, 'num_rows is 100 .* at least 1024'),
    ({'num_before': -1}, 'num_before is -1'),
    ({'rows_per_call': 1}, 'rows_per_call is 1, and .* has 1 rows: give'),
    ({'settings': {}}, 'has 0 rows: give settings'),
    ({'seed': -1}, 'seed is -1'),
    (
      {'settings': {'p': Sampling(temperature=1.0, presence_penalty=0.5)}},
      "presence_penalty is set in 'p', but samplers are audited with temper",
    ),
    ({'settings': {'t': Sampling(temperature=-1.0)}}, 'temperature is'),
  ],
)
def test_bad_settings_are_refused_before_the_sampler_is_called(
  options, message
):
  def sampler(*given):
    raise AssertionError(given)

  with pytest.raises(ValueError, match=message):
    _audit(sampler, **options)
