"""Typical acceptance: a lossy rule that keeps tokens plausible to the target.

Cai et al., 2401.10774 (Medusa), section 2.3.1, after Hewitt et al., 2210.15191.
"""

import dataclasses

import jax.numpy as jnp

from specsample import settings
from specsample import tree
from specsample import types
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical(rule.Rule):
  """Keeps the longest path of tokens above min(epsilon, delta exp(-entropy)).

  Draft token x passes if p(x) > min(epsilon, delta exp(-H(p))), where p is the
  target's distribution and H its entropy in nats. Of several longest paths, the
  one with the highest probability under the target is kept. The token after the
  path is drawn from the target. The output does not have the target's
  distribution.
  """

  epsilon: settings.Share = 0.09
  delta: settings.Share = 0.3
  lossless = False
  draft_kinds = frozenset(types.DraftKind)

  def _law(self, draft, target_probs):
    parents = rule.parents(draft)
    is_possible = target_probs > 0
    logs = jnp.log(jnp.where(is_possible, target_probs, 1))
    entropy = -jnp.sum(target_probs * logs, axis=-1)
    threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
    own = rule.of_children(target_probs, draft)
    is_kept = (own > threshold[parents]) & (draft.tokens >= 0)

    ancestors = tree.ancestors(parents)
    on_the_way = ancestors[:, 1:]
    is_kept = jnp.all(is_kept | ~on_the_way, axis=1)  # [N + 1]
    log_own = jnp.log(jnp.where(own > 0, own, 1))
    scores = jnp.sum(jnp.where(on_the_way, log_own, 0), axis=1)
    depths = jnp.where(is_kept, tree.depths(ancestors), -1)
    is_longest = depths == jnp.max(depths)
    best = jnp.argmax(jnp.where(is_longest, scores, -jnp.inf))
    stop = (jnp.arange(parents.size + 1) == best).astype(target_probs.dtype)
    return Law(stop=stop, next=target_probs)
