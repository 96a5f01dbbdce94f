"""Block verification: the draft is verified as a whole, not token by token.

Sun et al., 2403.10444. In expectation it keeps at least as many tokens as the
token rule (`chain`).
"""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array, Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Block(rule.ChainRule):
  """Keeps the longest prefix that passes its independent test.

  Algorithm 2 of the paper. Let p_i and q_i be the distributions of the target
  and the drafter after the first i draft tokens. With the joint ratio
  r_i = min(r_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i), 1), r_0 = 1, and the residual
  mass m_i = sum_x (r_i p_i(x) - q_i(x))+, prefix i < K passes with probability
  m_i / (m_i + 1 - r_i), and prefix K with probability r_K. The token after a
  kept prefix i < K is drawn from (r_i p_i - q_i)+, normalised; after prefix K
  it is drawn from p_K.

  The last prefix of a draft shorter than K passes as prefix K would, whether or
  not the target's distribution after it is given.
  """

  lossless = True

  def _law(self, draft, target_probs):
    draft_probs = rule.draft_probs(draft, target_probs)
    ratios = rule.ratio(
      rule.of_tokens(target_probs[:-1], draft.tokens),
      rule.of_tokens(draft_probs, draft.tokens),
    )
    joint = _joint_ratios(ratios)
    residual = jnp.maximum(
      joint[:-1, None] * target_probs[:-1] - draft_probs, 0
    )
    mass = jnp.sum(residual, axis=-1)
    # Past the end of the draft the mass is r_i, even if p_i is missing.
    mass = jnp.where(draft.tokens >= 0, mass, joint[:-1])
    room = mass + (1 - joint[:-1])  # at least the mass, even after rounding
    passes = jnp.where(room == 0, 1, rule.ratio(mass, room))
    # The empty prefix always passes; the whole draft has probability joint[-1].
    passes = jnp.concatenate([passes, joint[-1:]])
    passes = jnp.where(jnp.arange(passes.size) == 0, 1, passes)
    # A reversed cumulative product cannot be mapped over a sharded batch.
    is_later = ~jnp.tri(passes.size, dtype=bool)
    stop = passes * jnp.prod(jnp.where(is_later, 1 - passes, 1), axis=1)
    return Law(
      stop=stop,
      next=jnp.concatenate(
        [rule.normalise(residual, target_probs[:-1]), target_probs[-1:]]
      ),
    )


block = Block()


def _joint_ratios(ratios: Array) -> Array:
  finite = jnp.minimum(ratios, jnp.finfo(ratios.dtype).max)  # 0 * inf is NaN
  joint = jnp.ones(1, ratios.dtype)
  joints = [joint]
  for i in range(ratios.size):
    joint = jnp.minimum(joint * finite[i : i + 1], 1)
    joints.append(joint)
  return jnp.concatenate(joints)
