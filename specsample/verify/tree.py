"""Recursive rejection: tries the children of each node one after another.

SpecInfer (Miao et al., 2305.09781, Algorithm 2), Sequoia (Chen et al.,
2402.12374, Algorithm 2) and EAGLE (2401.15077). With point masses it is what
EAGLE-2 and Medusa do when they sample.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specsample import types
from specsample.types import Array, Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Tree(rule.Rule):
  """Accepts a child x with probability min(1, r(x) / q(x)), or tries the next.

  q is the distribution that x was drawn from. The residual distribution r is
  the target's at first; after each rejected child it becomes (r - q)+,
  normalised. If all children are rejected, the next token is drawn from r. On a
  chain this is the token rule.
  """

  lossless = True
  draft_kinds = frozenset(types.DraftKind)

  def _law(self, draft, target_probs):
    if draft.kind is types.DraftKind.POINT_MASS:
      return _of_point_masses(draft, target_probs)
    return _of_drawn(draft, target_probs)


tree = Tree()


def _of_point_masses(draft, target_probs):
  """Returns the law for point masses.

  The residual after a rejection is what it was without the rejected token.
  """
  parents, tokens = rule.parents(draft), draft.tokens
  is_before = rule.is_sibling_before(parents)
  is_again = jnp.any(is_before & (tokens == tokens[:, None]), axis=1)
  own = jnp.where(is_again, 0, rule.of_children(target_probs, draft))
  left = 1 - jnp.sum(jnp.where(is_before, own, 0), axis=1)
  accept = rule.ratio(own, jnp.maximum(left, own))
  residual = rule.without_children(target_probs, draft)
  return Law(
    stop=rule.stop_in_tree(parents, accept),
    next=rule.normalise(residual, target_probs),
  )


def _of_drawn(draft, target_probs):
  """Returns the law for drawn children.

  All first children are tried at once, then all second ones, and so on. Going
  child by child would copy the distributions of all nodes for every child.
  """
  parents, bounds = rule.parents(draft), rule.num_children(draft)
  rank = rule.siblings_before(parents)
  # Nodes that may have more than i children come before the others.
  nodes = np.argsort(np.negative(bounds), kind='stable')
  finished: list[Array] = []
  residual = jnp.take(target_probs, nodes, axis=0)
  accept = (0 * draft.tokens).astype(target_probs.dtype)
  for i in range(max(bounds)):
    count = sum(bound > i for bound in bounds)
    finished.insert(0, residual[count:])
    residual = residual[:count]
    is_child = (parents == nodes[:count, None]) & (rank == i)  # [count, N]
    child = jnp.argmax(is_child, axis=1)
    is_there = jnp.any(is_child, axis=1)
    token = jnp.where(is_there, jnp.take(draft.tokens, child), -1)
    drawn = jnp.take(draft.probs, child, axis=0)
    own = rule.of_tokens(drawn, token)
    kept = rule.ratio(rule.of_tokens(residual, token), own)
    kept = jnp.minimum(kept, 1)[:, None]
    accept = accept + jnp.sum(jnp.where(is_child, kept, 0), axis=0)
    after = rule.normalise(jnp.maximum(residual - drawn, 0), residual)
    residual = jnp.where((own > 0)[:, None], after, residual)
  rows = jnp.concatenate([residual, *finished])
  return Law(
    stop=rule.stop_in_tree(parents, accept),
    next=jnp.take(rows, np.argsort(nodes), axis=0),
  )
