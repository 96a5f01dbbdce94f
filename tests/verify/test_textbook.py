"""The textbook's example of speculative sampling, by the token rule.

A draft token x is kept with probability min(1, p(x) / q(x)), p the target's
distribution and q the drafter's (Leviathan et al., 2211.17192).
"""

import jax
import jax.numpy as jnp
import numpy as np

from specsample import verify
from specsample.types import Draft, DraftKind

# In each distribution the draft token comes first.
_DRAFT = jnp.asarray([[0.9, 0.05, 0.05], [0.8, 0.1, 0.1], [0.4, 0.3, 0.3]])
_TARGET = jnp.asarray(
  [[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.4, 0.3, 0.3], [0.2, 0.5, 0.3]]
)
_NUM_KEYS = 40_000


def _drafted(*tokens):
  return Draft(
    tokens=jnp.asarray(tokens, jnp.int32),
    probs=_DRAFT[: len(tokens)],
    kind=DraftKind.SAMPLED,
  )


def _at_least(stop):
  """Returns the probability [K + 1] to keep at least each number of tokens."""
  return np.cumsum(np.asarray(stop)[::-1])[::-1]


def test_a_token_is_kept_by_the_ratio_of_its_probabilities():
  law = verify.chain.law(_drafted(0, 0, 0), _TARGET)
  at_least = _at_least(law.stop)
  kept = at_least[1:] / at_least[:-1]
  # 0.8 / 0.9, 0.3 / 0.8, and a token as likely to the target as it was drawn.
  np.testing.assert_allclose(kept, [0.889, 0.375, 1], atol=5e-4)


def test_draws_keep_and_replace_in_these_shares():
  draft = _drafted(0, 0, 0)
  keys = jax.random.split(jax.random.key(0), _NUM_KEYS)
  draw = lambda key: verify.chain(key, draft, _TARGET)
  verdicts = jax.jit(jax.vmap(draw))(keys)
  accepted = np.asarray(verdicts.num_accepted)
  tokens = np.asarray(verdicts.next_token)
  share = lambda number: np.mean(accepted >= number)
  assert abs(share(1) - 8 / 9) < 0.01
  assert abs(share(2) / share(1) - 3 / 8) < 0.01
  # The third token alone would always be kept, but it falls with the second.
  assert not np.any(accepted == 2)
  # (0.3 - 0.8, 0.5 - 0.1, 0.2 - 0.1)+ = (0, 0.4, 0.1), of sum 0.5.
  replaced = np.bincount(tokens[accepted == 1], minlength=3)
  np.testing.assert_allclose(
    replaced / replaced.sum(), [0, 0.8, 0.2], atol=0.01
  )
  assert replaced[0] == 0


def test_kept_or_replaced_a_token_has_the_targets_distribution():
  emitted = np.zeros(3)
  for token, prob in enumerate(np.asarray(_DRAFT[0])):
    law = verify.chain.law(_drafted(token), _TARGET[:2])
    emitted[token] += prob * law.stop[1]
    emitted += prob * np.asarray(law.stop[0] * law.next[0])
  np.testing.assert_allclose(emitted, _TARGET[0], atol=1e-6)
