"""The enumeration itself, on laws that are known without it."""

import dataclasses

import numpy as np
import pytest

from specsample import drafters
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import cases
from specsample.testing import conditional
from specsample.testing import drafted
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import grammar
from specsample.testing import HashModel
from specsample.testing import proposal

_MODEL = HashModel(vocab_size=3)
_OTHER = dataclasses.replace(_MODEL, noise=0.7)
_PROMPT = (1, 0, 1)
_PARAMS = {'target': {}, 'drafter': {}}


def _context_free(*probs):
  return lambda t, committed: np.tile(probs, (len(probs) ** t, 1))


def _tables(sampling=cases._PLAIN):
  return (
    conditional.from_model(_MODEL, {}, _PROMPT, sampling),
    conditional.from_model(_OTHER, {}, _PROMPT, sampling),
  )


def test_strings_are_in_order_and_indexed():
  strings = conditional.strings(3, 4)
  assert strings.shape == (81, 4)
  np.testing.assert_array_equal(strings[5], [0, 0, 1, 2])
  np.testing.assert_array_equal(conditional.index(strings, 3), np.arange(81))


def test_conditional_is_the_models_own():
  target, _ = _tables(Sampling(temperature=0.5))
  tokens = np.asarray([[*_PROMPT, 2, 1]])
  output, _ = _MODEL.apply({}, tokens, _MODEL.init_cache(1, 5))
  logits = np.asarray(output.logits[0, -1], float) / 0.5
  expected = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(target(2, 2)[2 * 3 + 1], expected, atol=1e-15)


@pytest.mark.parametrize(
  'sampling',
  [
    Sampling(temperature=1.0, frequency_penalty=0.7),
    cases.constrained_by(grammar.OneForbidden(3), start=1),
  ],
  ids=['penalty', 'constraint'],
)
def test_tokens_count_the_same_committed_or_drafted(sampling):
  target, _ = _tables(sampling)
  plain, _ = _tables()
  for committed in range(4):
    np.testing.assert_allclose(target(3, committed), target(3, 3), atol=1e-15)
  assert np.abs(target(3, 3) - plain(3, 3)).max() > 0.1


def test_after_an_end_comes_nothing_else():
  target, _ = _tables()
  law = conditional.joint_law(conditional.ending(target, 2), 3)
  strings = conditional.strings(3, 3)
  goes_on = (strings[:, :-1] == 2) & (strings[:, 1:] != 2)
  assert (law[goes_on.any(axis=1)] == 0).all()
  np.testing.assert_allclose(law.sum(), 1, atol=1e-15)
  np.testing.assert_allclose(law[-1], target(0, 0)[0, 2], atol=1e-15)


@pytest.mark.parametrize(
  ('rule', 'formula', 'kept'),
  [
    (verify.chain, acceptance.tree, 10 / 9),
    (verify.block, acceptance.multi_path_block, 11 / 9),
  ],
)
def test_worked_example_of_the_papers(rule, formula, kept):
  drafts = proposal.sampled(_context_free(2 / 3, 1 / 3), 2)
  target = _context_free(1 / 3, 2 / 3)
  assert formula(drafts, target).sum() == pytest.approx(kept, abs=1e-15)
  enumeration = enumerate_lib.Enumeration(rule, drafts, target)
  assert enumeration.expected_accepted() == pytest.approx(kept, abs=1e-15)


def test_a_rule_that_keeps_every_draft_has_the_drafters_law():
  target, draft = _tables()
  enumeration = enumerate_lib.Enumeration(
    verify.Synthetic(rate=1.0), proposal.sampled(draft, 2), target
  )
  mixed = lambda t, committed: (target if t % 3 == 2 else draft)(t, committed)
  expected = conditional.joint_law(mixed, 6)
  np.testing.assert_allclose(enumeration.joint_law(2), expected, atol=1e-15)
  error, variation = enumeration.error(1, target)
  plain = conditional.joint_law(target, 3)
  difference = np.abs(conditional.joint_law(mixed, 3) - plain)
  assert error == pytest.approx(difference.max(), abs=1e-15)
  assert variation == pytest.approx(difference.sum() / 2, abs=1e-15)
  np.testing.assert_allclose(enumeration.num_accepted(), [0, 0, 1], atol=1e-15)


def test_a_rule_that_keeps_no_draft_has_the_targets_law():
  target, draft = _tables()
  enumeration = enumerate_lib.Enumeration(
    verify.Synthetic(rate=0.0), proposal.sampled(draft, 2), target
  )
  assert enumeration.error(2, target)[1] < 1e-14


def test_rounds_are_followed_from_where_they_end():
  target, draft = _tables()
  enumeration = enumerate_lib.Enumeration(
    verify.chain, proposal.sampled(draft, 1), target
  )
  # By hand: round 2 begins after one token or two.
  after_one, after_two = (
    emission.reshape(-1) for emission in enumeration.emissions(0)
  )
  kept = lambda t: enumeration.emissions(t)[1].sum(axis=(1, 2))
  expected = after_one @ kept(1) + after_two @ kept(2)
  np.testing.assert_allclose(
    enumeration.num_accepted(round=1), [1 - expected, expected], atol=1e-15
  )


@pytest.mark.slow
@pytest.mark.parametrize('penalty', [None, 1.5])
def test_a_drafters_own_proposals_equal_its_models_table(penalty):
  sampling = Sampling(temperature=0.8, top_k=2, repetition_penalty=penalty)
  _, draft = _tables(sampling)
  chain = drafters.Chain(model=_OTHER, num_draft_tokens=2)
  found = drafted.from_drafter(
    chain, _PARAMS, _MODEL, _PROMPT, sampling, rounds=2
  )
  expected = proposal.sampled(draft, 2)
  for t in range(4):
    np.testing.assert_array_equal(found(t).tokens, expected(t).tokens)
    np.testing.assert_allclose(found(t).probs, expected(t).probs, atol=1e-15)
    np.testing.assert_allclose(
      found(t).weights, expected(t).weights, atol=1e-15
    )


def test_a_lookup_is_enumerated_as_it_is():
  ngram = drafters.Ngram(num_draft_tokens=2, min_ngram=1)
  found = drafted.from_drafter(ngram, _PARAMS, _MODEL, _PROMPT, rounds=2)
  # After (1, 0, 1), the token after the suffix's latest occurrence.
  np.testing.assert_array_equal(found(0).tokens, [[[0, 1]]])
  np.testing.assert_array_equal(
    found(1).tokens[:, 0], [[1, 0], [1, 1], [-1, -1]]
  )
  assert found(1).probs is None


def test_most_likely_drafts_follow_their_own_path():
  _, draft = _tables()
  drafts = proposal.most_likely(draft, 2)(1)
  first = draft(1, 1).argmax(axis=1)
  np.testing.assert_array_equal(drafts.tokens[:, 0, 0], first)
  second = draft(2, 1)[np.arange(3) * 3 + first].argmax(axis=1)
  np.testing.assert_array_equal(drafts.tokens[:, 0, 1], second)


def test_cuts_are_taken_where_they_say():
  draft = _context_free(0.7, 0.2, 0.1)
  after = proposal.sampled(draft, 2, cases.after_the_draw(0.5))(0)
  np.testing.assert_array_equal(
    after.tokens[0],
    [[0, 0], [0, 1], [0, 2]] + [[1, -1]] * 3 + [[2, -1]] * 3,
  )
  assert after.weights.sum() == pytest.approx(1)
  assert (after.probs[0, 3:, 1] == 0).all()
  before = proposal.sampled(draft, 2, cases.before_the_draw(0.8))(0)
  assert (before.tokens == -1).all()


def test_coupled_acceptance_on_two_tokens():
  # Both choose 0 with probability 1 / (1 + max(1, 3)) and 1 with 1 / (1 + 1).
  found = acceptance.coupled(
    _context_free(0.25, 0.75), _context_free(0.5, 0.5), 2
  )
  match = 1 / 4 + 1 / 2
  np.testing.assert_allclose(found, [match, match**2], atol=1e-15)
  np.testing.assert_allclose(
    acceptance.law(found), [1 - match, match - match**2, match**2], atol=1e-15
  )


def test_standard_cases_cover_what_they_promise():
  every = list(cases.standard_cases())
  sizes = {(c.vocab_size, c.num_draft_tokens) for c in every}
  assert sizes >= {(v, k) for v in (2, 3, 4) for k in (1, 2, 3)}
  assert {rounds for c in every for rounds in c.rounds} == {2, 3}
  # Each setting of `Sampling` differs from its default somewhere.
  settings = [
    sampling
    for scene in cases._SCENES
    for sampling in (scene.target, scene.draft)
  ]
  names = {field.name for field in dataclasses.fields(Sampling)}
  differs = lambda name: any(
    getattr(sampling, name) != getattr(Sampling(), name)
    for sampling in settings
  )
  assert set(filter(differs, names)) == names
