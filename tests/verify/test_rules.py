"""Every verification rule, on numbers that were worked out by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import sampling
from specsample import verify
from specsample.testing import chi_square
from specsample.types import Draft, DraftKind

_SYNTHETIC = verify.Synthetic(rate=0.8)
_RULES = [verify.chain, verify.block, _SYNTHETIC]
_ALL = [*_RULES, verify.coupled]
_KINDS = [DraftKind.POINT_MASS, DraftKind.SAMPLED]
_WITH_KIND = [(rule, kind) for rule in _RULES for kind in _KINDS]
_WITH_KIND.append((verify.coupled, DraftKind.POINT_MASS))

_TARGET = [0.5, 0.3, 0.2]
_DRAFT = [0.2, 0.3, 0.5]
_BONUS = [0.1, 0.6, 0.3]


def _sampled(tokens, probs):
  return Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    probs=jnp.asarray(probs, jnp.float32),
    kind=DraftKind.SAMPLED,
  )


def _point_mass(*tokens):
  return Draft(
    tokens=jnp.asarray(tokens, jnp.int32), probs=None, kind=DraftKind.POINT_MASS
  )


def _check(law, stop, next_tokens):
  np.testing.assert_allclose(law.stop, stop, atol=1e-6)
  for row, expected in next_tokens.items():
    np.testing.assert_allclose(law.next[row], expected, atol=1e-6)


@pytest.mark.parametrize(
  ('token', 'accept'), [(0, 1.0), (1, 1.0), (2, 0.2 / 0.5)]
)
@pytest.mark.parametrize('rule', [verify.chain, verify.block])
def test_one_sampled_draft(rule, token, accept):
  law = rule.law(_sampled([token], [_DRAFT]), jnp.asarray([_TARGET, _BONUS]))
  _check(law, [1 - accept, accept], {0: [1, 0, 0], 1: _BONUS})


@pytest.mark.parametrize('rule', [verify.chain, verify.block, verify.coupled])
def test_one_draft_of_a_point_mass(rule):
  law = rule.law(_point_mass(1), jnp.asarray([_TARGET, _BONUS]))
  _check(law, [0.7, 0.3], {0: [5 / 7, 0, 2 / 7], 1: _BONUS})


def test_chain_stops_at_the_first_rejection():
  draft = _sampled([2, 0], [_DRAFT, _DRAFT])
  target_probs = jnp.asarray([_TARGET, _DRAFT, _BONUS])
  law = verify.chain.law(draft, target_probs)
  # The second draft is as likely to the target, but the first one is not.
  _check(law, [0.6, 0, 0.4], {0: [1, 0, 0], 1: _DRAFT, 2: _BONUS})


@pytest.mark.parametrize(
  ('tokens', 'stop'),
  [
    # r = 1/2, 1/4; no residual after the first: S = 0.
    ([0, 0], [3 / 4, 0, 1 / 4]),
    # r = 1/2, min(1/2 * 2, 1): an unlikely token is made up for.
    ([0, 1], [0, 0, 1]),
    # r = 1, 1/2; S = 1/3 and h = S / (S + 1 - 1) = 1.
    ([1, 0], [0, 1 / 2, 1 / 2]),
    ([1, 1], [0, 0, 1]),
  ],
)
def test_block_judges_the_draft_as_a_whole(tokens, stop):
  target, draft = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
  law = verify.block.law(
    _sampled(tokens, [draft, draft]), jnp.asarray([target, target, target])
  )
  _check(law, stop, {0: [0, 1], 2: target})


def test_block_scales_the_residual_by_the_joint_ratio():
  # r_1 = 0.8; (0.8 target - draft)+ = (0.38, 0.06, 0), mass 0.44.
  first, second = [0.4, 0.6, 0.0], [0.5, 0.5, 0.0]
  target, draft = [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]
  law = verify.block.law(
    _sampled([0, 2], [second, draft]), jnp.asarray([first, target, _BONUS])
  )
  passes, whole = 0.44 / (0.44 + 1 - 0.8), 0.8 * 0.2 / 0.8
  kept_one = passes * (1 - whole)
  _check(
    law,
    [1 - whole - kept_one, kept_one, whole],
    {1: [0.38 / 0.44, 0.06 / 0.44, 0]},
  )


def test_synthetic_keeps_drafts_at_its_rate():
  draft = _point_mass(0, 1, -1)
  target_probs = jnp.asarray([_TARGET, _DRAFT, _BONUS, _TARGET])
  law = _SYNTHETIC.law(draft, target_probs)
  _check(law, [0.2, 0.16, 0.64, 0], {0: _TARGET, 1: _DRAFT, 2: _BONUS})
  assert not _SYNTHETIC.lossless


def test_lenience_makes_the_test_easier_and_bounds_what_it_adds():
  rule, target = verify.Lenient(lenience=0.8), jnp.asarray([_TARGET, _BONUS])
  emitted = np.zeros(3)
  for token, share in enumerate(_DRAFT):
    law = rule.law(_sampled([token], [_DRAFT]), target)
    # Tokens 0 and 1 pass as ever; 2 with .2 / (.8 * .5).
    accept = 0.5 if token == 2 else 1
    _check(law, [1 - accept, accept], {0: [1, 0, 0], 1: _BONUS})
    emitted[token] += share * float(law.stop[1])
    emitted += share * float(law.stop[0]) * np.asarray(law.next[0])
  np.testing.assert_allclose(emitted, [0.45, 0.3, 0.25], atol=1e-6)
  assert np.all(emitted <= np.asarray(_TARGET) / 0.8 + 1e-6)
  exact = verify.Lenient(lenience=1.0).law(_sampled([2], [_DRAFT]), target)
  plain = verify.chain.law(_sampled([2], [_DRAFT]), target)
  np.testing.assert_array_equal(exact.stop, plain.stop)
  assert not rule.lossless


@pytest.mark.parametrize('lenience', [0, 1.1, float('nan')])
def test_lenience_refuses_what_is_no_share(lenience):
  with pytest.raises(ValueError, match=f'is {lenience}: give more than 0'):
    verify.Lenient(lenience=lenience)


@pytest.mark.parametrize('rate', [-0.1, 1.1, float('nan')])
def test_synthetic_refuses_what_is_no_probability(rate):
  with pytest.raises(ValueError, match=f'rate is {rate}'):
    verify.Synthetic(rate=rate)


def test_coupled_keeps_what_the_shared_noise_chooses():
  keys = jax.random.split(jax.random.key(3), 4)
  target_probs = jnp.full((4, 5), 0.2)
  chosen = [
    int(sampling.draw_coupled(key, row))
    for key, row in zip(keys, target_probs, strict=True)
  ]
  other = (chosen[1] + 1) % 5
  for drafts, kept in (
    ([chosen[0], other, chosen[2]], 1),
    ([chosen[0], chosen[1], chosen[2]], 3),
    ([chosen[0], chosen[1], -1], 2),
    ([-1, -1, -1], 0),
  ):
    verdict = verify.coupled(keys, _point_mass(*drafts), target_probs)
    assert verdict.num_accepted == kept
    assert verdict.next_token == chosen[kept]


def _random_draft(kind, num_drafts, kept, seed):
  """A draft and target of 4 tokens, with zeros; `kept` of it are there."""
  rng = np.random.default_rng(seed)

  def probs(rows):
    weights = rng.exponential(size=(rows, 4)) * (rng.random((rows, 4)) < 0.7)
    weights[:, rng.integers(4)] += 0.1
    return weights / weights.sum(axis=1, keepdims=True)

  draft_probs = probs(num_drafts)
  tokens = [rng.choice(4, p=row) for row in draft_probs]
  is_kept = np.arange(num_drafts) < kept
  tokens = np.where(is_kept, tokens, -1).astype(np.int32)
  draft_probs = np.where(is_kept[:, None], draft_probs, 0)
  if kind is DraftKind.POINT_MASS:
    draft = _point_mass(*tokens)
  else:
    draft = _sampled(tokens, draft_probs.reshape(num_drafts, 4))
  return draft, jnp.asarray(probs(num_drafts + 1), jnp.float32)


@pytest.mark.parametrize(('rule', 'kind'), _WITH_KIND, ids=str)
@pytest.mark.parametrize(
  ('num_drafts', 'kept'), [(0, 0), (1, 1), (3, 3), (3, 1), (4, 0)]
)
def test_law_is_a_distribution(rule, kind, num_drafts, kept):
  many = [_random_draft(kind, num_drafts, kept, seed) for seed in range(50)]
  drafts, target_probs = jax.tree.map(lambda *x: jnp.stack(x), *many)
  found = jax.jit(jax.vmap(rule.law))(drafts, target_probs)
  assert (found.stop >= 0).all() and (found.next >= 0).all()
  np.testing.assert_allclose(found.stop.sum(axis=-1), 1, atol=1e-6)
  np.testing.assert_allclose(found.next.sum(axis=-1), 1, atol=1e-6)
  # Padding is never accepted.
  assert (found.stop[:, kept + 1 :] == 0).all()


@pytest.mark.parametrize('rule', [verify.chain, verify.block])
def test_without_a_residual_the_target_is_sampled(rule):
  probs = jnp.asarray([_TARGET, _TARGET])
  law = rule.law(_sampled([0, 1], probs), jnp.asarray([*probs, _BONUS]))
  _check(law, [0, 0, 1], {0: _TARGET, 1: _TARGET, 2: _BONUS})


@pytest.mark.parametrize('rule', [verify.chain, verify.block])
def test_of_disjoint_supports_nothing_is_kept(rule):
  target_probs = jnp.asarray([[0, 0.4, 0.6], [0, 0.5, 0.5], _BONUS])
  law = rule.law(_sampled([0, 0], [[1, 0, 0], [1, 0, 0]]), target_probs)
  _check(law, [1, 0, 0], {0: [0, 0.4, 0.6]})


@pytest.mark.parametrize('rule', _ALL, ids=repr)
@pytest.mark.parametrize('kind', _KINDS)
def test_refuses_a_draft_that_contradicts_its_kind(rule, kind):
  draft = _sampled([0], [_DRAFT])
  if kind is DraftKind.SAMPLED:
    draft = dataclasses.replace(draft, probs=None)
  keys = jax.random.split(jax.random.key(0), 2)
  key = keys if rule.positional else keys[0]
  contradictory = dataclasses.replace(draft, kind=kind)
  with pytest.raises(ValueError, match=f"kind '{kind.value}' came with"):
    rule(key, contradictory, jnp.asarray([_TARGET, _BONUS]))


def test_coupled_has_no_law_for_sampled_drafts():
  draft = _sampled([0], [_DRAFT])
  with pytest.raises(
    ValueError, match="not exact for drafts of kind 'sampled'"
  ):
    verify.coupled.law(draft, jnp.asarray([_TARGET, _BONUS]))


def _draw(rule, draft, target_probs, num_draws):
  """Verdicts of many keys."""
  shape = (num_draws, len(target_probs)) if rule.positional else (num_draws,)
  keys = jax.random.split(jax.random.key(5), shape)
  return _draw_all(rule, keys, draft, target_probs)


@functools.partial(jax.jit, static_argnums=0)
def _draw_all(rule, keys, draft, target_probs):
  return jax.vmap(rule, (0, None, None))(keys, draft, target_probs)


@pytest.mark.parametrize(('rule', 'kind'), _WITH_KIND, ids=str)
def test_draws_follow_the_law(rule, kind):
  groups = []
  for seed in range(3):
    draft, target_probs = _random_draft(kind, 3, 3 - (seed == 2), seed)
    found = rule.law(draft, target_probs)
    verdict = _draw(rule, draft, target_probs, 20_000)
    cells = verdict.num_accepted * 4 + verdict.next_token
    # In float64, where what float32 leaves over is no deviation.
    probs = np.asarray(found.stop, float)[:, None] * np.asarray(found.next)
    counts = np.bincount(cells, minlength=probs.size)
    groups.append((counts, probs.ravel() / probs.sum()))
  result = chi_square.test(groups)
  assert result.passed, result
  assert result.detectable < 0.03


@pytest.mark.parametrize('kind', _KINDS)
@pytest.mark.parametrize('rule', _ALL, ids=repr)
def test_a_token_of_probability_zero_is_never_drawn(rule, kind):
  rng = np.random.default_rng(0)
  vocab_size, num_drafts = 1000, 3
  allowed = rng.random((num_drafts + 1, vocab_size)) < 0.01
  allowed[0] = np.arange(vocab_size) == 17  # a greedy row
  weights = allowed * rng.exponential(size=allowed.shape)
  target_probs = weights / weights.sum(axis=1, keepdims=True)
  tokens = np.asarray([17, *target_probs[1:3].argmax(axis=1)])
  draft = _point_mass(*tokens)
  if kind is DraftKind.SAMPLED:
    # Likelier than to the target, so that some are rejected.
    surest = np.eye(vocab_size)[tokens]
    draft = _sampled(tokens, 0.9 * surest + 0.1 / vocab_size)
  verdict = _draw(rule, draft, jnp.asarray(target_probs, jnp.float32), 2_000)
  assert allowed[verdict.num_accepted, verdict.next_token].all()
  assert len(np.unique(verdict.num_accepted)) > 1


@pytest.mark.parametrize('rule', _ALL, ids=repr)
def test_nothing_drafted_samples_the_target(rule):
  target_probs = jnp.asarray([_TARGET, _DRAFT, _BONUS])
  verdict = _draw(rule, _point_mass(-1, -1), target_probs, 20_000)
  assert (verdict.num_accepted == 0).all()
  counts = np.bincount(verdict.next_token, minlength=3)
  assert chi_square.test([(counts, np.asarray(_TARGET))]).passed


@pytest.mark.parametrize(
  ('rules', 'kinds'),
  [
    ([*_ALL, verify.Lenient(lenience=0.5)], _KINDS),
    ([verify.tree, verify.traversal, verify.Typical()], list(DraftKind)),
    ([verify.k_seq, verify.multi_path_block], [DraftKind.SAMPLED]),
    ([verify.greedy_draft], [DraftKind.TOP_AND_SAMPLED]),
  ],
)
def test_a_rule_takes_the_kinds_that_it_is_made_for(rules, kinds):
  for rule in rules:
    assert set(rule.draft_kinds) == set(kinds), rule
