"""The rules for chains, on numbers that were worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsample import sampling
from specsample import verify
from specsample.types import Draft, DraftKind

_TARGET, _DRAFT = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
_BONUS = [0.1, 0.6, 0.3]
_TOKEN_AND_BLOCK = [verify.chain, verify.block]


def _sampled(tokens, probs):
  return Draft(
    tokens=np.asarray(tokens, np.int32),
    probs=np.asarray(probs, np.float32),
    kind=DraftKind.SAMPLED,
  )


def _point_mass(*tokens):
  return Draft(
    tokens=np.asarray(tokens, np.int32), probs=None, kind=DraftKind.POINT_MASS
  )


_TEXTBOOK = _sampled(
  [0, 0, 0], [[0.9, 0.05, 0.05], [0.8, 0.1, 0.1], [0.4, 0.3, 0.3]]
)
_ONE_THIRD, _TWO_THIRDS = [1 / 3, 2 / 3], [2 / 3, 1 / 3]


def _of_two(*tokens):
  return _sampled(tokens, [_TWO_THIRDS, _TWO_THIRDS]), [_ONE_THIRD] * 3


# Each rule, the draft with the target's distributions, how likely the kept
# drafts are to end at each, and what some rows of `next` are.
_WORKED = {
  'one draft': [
    (
      rule,
      _sampled([token], [_DRAFT]),
      [_TARGET, _BONUS],
      [1 - kept, kept],
      {0: [1, 0, 0], 1: _BONUS},
    )
    for rule in _TOKEN_AND_BLOCK
    for token, kept in ((0, 1.0), (1, 1.0), (2, 0.2 / 0.5))
  ],
  'one point mass': [
    (
      rule,
      _point_mass(1),
      [_TARGET, _BONUS],
      [0.7, 0.3],
      {0: [5 / 7, 0, 2 / 7], 1: _BONUS},
    )
    for rule in [*_TOKEN_AND_BLOCK, verify.coupled]
  ],
  # The second draft is as likely to the target, but the first one is not.
  'the first rejection': [
    (
      verify.chain,
      _sampled([2, 0], [_DRAFT, _DRAFT]),
      [_TARGET, _DRAFT, _BONUS],
      [0.6, 0, 0.4],
      {0: [1, 0, 0], 1: _DRAFT, 2: _BONUS},
    )
  ],
  # Ratios of .8 / .9, .3 / .8 and 1 (Leviathan et al., 2211.17192).
  'the textbook': [
    (
      verify.chain,
      _TEXTBOOK,
      [[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.4, 0.3, 0.3], [0.2, 0.5, 0.3]],
      [1 / 9, 8 / 9 * 5 / 8, 0, 8 / 9 * 3 / 8],
      # (0.3 - 0.8, 0.5 - 0.1, 0.2 - 0.1)+ = (0, 0.4, 0.1), of sum 0.5.
      {1: [0, 0.8, 0.2]},
    )
  ],
  'the draft as a whole': [
    (verify.block, *_of_two(*tokens), stop, {0: [0, 1], 2: _ONE_THIRD})
    for tokens, stop in (
      # r = 1/2, 1/4; no residual after the first: S = 0.
      ([0, 0], [3 / 4, 0, 1 / 4]),
      # r = 1/2, min(1/2 * 2, 1): an unlikely token is made up for.
      ([0, 1], [0, 0, 1]),
      # r = 1, 1/2; S = 1/3 and h = S / (S + 1 - 1) = 1.
      ([1, 0], [0, 1 / 2, 1 / 2]),
      ([1, 1], [0, 0, 1]),
    )
  ],
  # r_1 = 0.8; (0.8 target - draft)+ = (0.38, 0.06, 0), mass 0.44, so that the
  # first passes with 0.44 / (0.44 + 1 - 0.8) and the whole draft with 0.2.
  'a residual scaled by the joint ratio': [
    (
      verify.block,
      _sampled([0, 2], [[0.5, 0.5, 0.0], [0.1, 0.1, 0.8]]),
      [[0.4, 0.6, 0.0], [0.6, 0.2, 0.2], _BONUS],
      [0.8 * 0.2 / 0.64, 0.8 * 0.44 / 0.64, 0.2],
      {1: [0.38 / 0.44, 0.06 / 0.44, 0]},
    )
  ],
  'drafts at a rate': [
    (
      verify.Synthetic(rate=0.8),
      _point_mass(0, 1, -1),
      [_TARGET, _DRAFT, _BONUS, _TARGET],
      [0.2, 0.16, 0.64, 0],
      {0: _TARGET, 1: _DRAFT, 2: _BONUS},
    )
  ],
  'no residual': [
    (
      rule,
      _sampled([0, 1], [_TARGET, _TARGET]),
      [_TARGET, _TARGET, _BONUS],
      [0, 0, 1],
      {0: _TARGET, 1: _TARGET, 2: _BONUS},
    )
    for rule in _TOKEN_AND_BLOCK
  ],
  'disjoint supports': [
    (
      rule,
      _sampled([0, 0], [[1, 0, 0], [1, 0, 0]]),
      [[0, 0.4, 0.6], [0, 0.5, 0.5], _BONUS],
      [1, 0, 0],
      {0: [0, 0.4, 0.6]},
    )
    for rule in _TOKEN_AND_BLOCK
  ],
}


@pytest.mark.slow(but=('one draft',))
@pytest.mark.parametrize('name', _WORKED)
def test_a_law_is_the_one_worked_out(name):
  for rule, draft, target, stop, following in _WORKED[name]:
    law = rule.law(jax.tree.map(jnp.asarray, draft), jnp.asarray(target))
    np.testing.assert_allclose(law.stop, stop, atol=1e-6)
    for row, expected in following.items():
      np.testing.assert_allclose(law.next[row], expected, atol=1e-6)


def test_lenience_makes_the_test_easier_and_bounds_what_it_adds():
  rule, target = verify.Lenient(lenience=0.8), jnp.asarray([_TARGET, _BONUS])
  emitted = np.zeros(3)
  for token, share in enumerate(_DRAFT):
    law = rule.law(_sampled([token], [_DRAFT]), target)
    # Tokens 0 and 1 pass as ever; 2 with .2 / (.8 * .5).
    accept = 0.5 if token == 2 else 1
    np.testing.assert_allclose(law.stop, [1 - accept, accept], atol=1e-6)
    np.testing.assert_allclose(law.next, [[1, 0, 0], _BONUS], atol=1e-6)
    emitted[token] += share * float(law.stop[1])
    emitted += share * float(law.stop[0]) * np.asarray(law.next[0])
  np.testing.assert_allclose(emitted, [0.45, 0.3, 0.25], atol=1e-6)
  assert np.all(emitted <= np.asarray(_TARGET) / 0.8 + 1e-6)
  exact = verify.Lenient(lenience=1.0).law(_sampled([2], [_DRAFT]), target)
  plain = verify.chain.law(_sampled([2], [_DRAFT]), target)
  np.testing.assert_array_equal(exact.stop, plain.stop)


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


_NAN = float('nan')


@pytest.mark.parametrize(
  ('rule', 'settings', 'message'),
  [
    *(
      (verify.Lenient, {'lenience': x}, f'lenience is {x}: give more than 0')
      for x in (0, 1.1, _NAN)
    ),
    *(
      (verify.Synthetic, {'rate': x}, f'rate is {x}') for x in (-0.1, 1.1, _NAN)
    ),
    (verify.Typical, {'delta': 1.5}, r'delta is 1\.5: give a number from'),
    (verify.Candidates, {'k': 0}, r'Candidates\.k is 0'),
    (verify.Candidates, {'k': 2.5}, r'Candidates\.k is 2\.5'),
    (verify.Candidates, {'threshold': 0.0}, r'Candidates\.threshold is 0\.0'),
    (verify.Candidates, {'threshold': 1.5}, r'Candidates\.threshold is 1\.5'),
    *(
      (verify.Certified, {'scored': x}, 'scored is')
      for x in ((), (64, 8), (8, 8), (0, 8), 8, (2.5,))
    ),
  ],
)
def test_settings_out_of_range_are_refused(rule, settings, message):
  with pytest.raises(ValueError, match=message):
    rule(**settings)
