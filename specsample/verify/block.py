"""Block verification: the draft is judged as a whole (Sun et al., 2403.10444).

Never keeps fewer tokens in expectation than the token rule.
"""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array, Draft, Law, Verdict
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Block:
  """Keeps the longest prefix of which an independent test succeeds."""

  lossless = True
  positional = False
  draft_laws = rule.CHAIN_LAWS

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """The distribution of the verdict, given target_probs [K + 1, V].

    With joint ratio r_i = min(r_{i-1} target / draft, 1), r_0 = 1, and residual
    mass m_i = sum (r_i target - draft)+, prefix i < K passes with probability
    m_i / (m_i + 1 - r_i), prefix K with r_K (Algorithm 2 there). The token
    after a kept prefix i < K follows (r_i target - draft)+, normalised. A
    shorter draft's last prefix passes as the K-th does, with or without a
    distribution of the target behind it.
    """
    rule.check_chain('block', draft, self.draft_laws)
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
    # Where nothing is drafted, all of r_i target: but that may be missing.
    mass = jnp.where(draft.tokens >= 0, mass, joint[:-1])
    room = mass + (1 - joint[:-1])  # at least the mass, in floats too
    passes = jnp.where(room == 0, 1, rule.ratio(mass, room))
    # The empty prefix always passes; the whole draft's last test is its ratio.
    passes = jnp.concatenate([passes, joint[-1:]])
    passes = jnp.where(jnp.arange(passes.size) == 0, 1, passes)
    # Not a reversed cumulative product: mapped over a divided batch, there is
    # none.
    is_later = ~jnp.tri(passes.size, dtype=bool)
    stop = passes * jnp.prod(jnp.where(is_later, 1 - passes, 1), axis=1)
    return Law(
      stop=stop,
      next=jnp.concatenate(
        [rule.normalise(residual, target_probs[:-1]), target_probs[-1:]]
      ),
    )

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    """See `types.Verifier`."""
    return rule.draw(key, draft, self.law(draft, target_probs))


block = Block()


def _joint_ratios(ratios: Array) -> Array:
  finite = jnp.minimum(ratios, jnp.finfo(ratios.dtype).max)  # 0 * inf is NaN
  joint = jnp.ones(1, ratios.dtype)
  joints = [joint]
  for i in range(ratios.size):
    joint = jnp.minimum(joint * finite[i : i + 1], 1)
    joints.append(joint)
  return jnp.concatenate(joints)
