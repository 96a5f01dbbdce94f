"""Traversal verification: a tree is verified from its leaves to its root.

Weng et al., 2505.12398. On a chain this is block verification.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import types
from specsample.types import Law
from specsample.verify import rule


@dataclasses.dataclass(frozen=True)
class Traversal(rule.Rule):
  """Tries the whole path to each leaf in turn and removes rejected leaves.

  p is the target's distribution after a node's parent, and q the one that the
  node's token x was drawn from. The root has a = 1, and a node has
  a = min(1, a_parent p(x) / q(x)). A leaf's path is kept with probability a. If
  it is rejected, the leaf is removed and its parent continues with the residual
  (a_parent p - q)+, normalised, in place of p and with
  a_parent <- S / (S + 1 - a_parent), where S is the mass of the residual; the
  root keeps a = 1. A node that has lost all its children is a leaf.
  """

  lossless = True
  draft_kinds = frozenset(types.DraftKind)

  def _law(self, draft, target_probs):
    parents = rule.parents(draft)
    size, dtype = parents.size + 1, target_probs.dtype
    depth = parents.size if draft.depth is None else draft.depth
    # Indexed by node; the pending token has no parent and was not drafted.
    before = jnp.pad(parents, (1, 0), constant_values=-1)
    tokens = jnp.pad(draft.tokens, (1, 0), constant_values=-1)

    # Derived from `tokens`: a loop mapped over a sharded batch cannot start
    # from constants.
    zeros = (0 * tokens).astype(dtype)

    def drawn_from(node):
      """Returns the distribution [V] that a node's token was drawn from."""
      if draft.probs is not None:
        return indexing.row(draft.probs, node - 1, None)
      return jax.nn.one_hot(tokens[node], target_probs.shape[-1], dtype=dtype)

    def first_leaf(left, own, target):
      """Returns the first remaining leaf, its parent, and `a` of both."""

      def down(_, place):
        node, _, a, _ = place
        is_child = left & (before == node)
        child = jnp.argmax(is_child).astype(jnp.int32)
        token = tokens[child]
        step = rule.ratio(
          rule.of_tokens(indexing.row(target, node, None), token),
          rule.of_tokens(drawn_from(child), token),
        )
        step = jnp.minimum(step, jnp.finfo(dtype).max)  # 0 * inf is NaN
        # A node that has lost a child has its updated `a` in `own`.
        new = jnp.where(own[child] < 0, jnp.minimum(a * step, 1), own[child])
        down = (child, node, new, a)
        return jax.tree.map(
          lambda x, y: jnp.where(jnp.any(is_child), x, y), down, place
        )

      nothing = jnp.sum(zeros)
      root = (nothing.astype(jnp.int32),) * 2 + (nothing + 1,) * 2
      return jax.lax.fori_loop(0, depth, down, root)

    def visit(_, carry):
      left, own, target, stop, remaining = carry
      leaf, parent, a, of_parent = first_leaf(left, own, target)
      stop = stop.at[leaf].set(remaining * a)
      remaining = remaining * (1 - a)
      before_it = indexing.row(target, parent, None)
      residual = jnp.maximum(of_parent * before_it - drawn_from(leaf), 0)
      mass = jnp.sum(residual)
      room = mass + (1 - of_parent)
      rest = jnp.where(room == 0, 1, rule.ratio(mass, room))
      rest = jnp.where(parent == 0, 1, rest)
      is_draft = leaf > 0
      there = is_draft & (tokens[leaf] >= 0)
      after = rule.normalise(residual, before_it)
      target = target.at[parent].set(jnp.where(there, after, before_it))
      rest = jnp.where(there, rest, of_parent)
      own = own.at[parent].set(jnp.where(is_draft, rest, own[parent]))
      left = left.at[leaf].set(False)
      return left, own, target, stop, remaining

    _, _, target, stop, _ = jax.lax.fori_loop(
      0,
      size,
      visit,
      (
        zeros == 0,
        (zeros - 1).at[0].set(1),
        target_probs,
        zeros,
        1 + jnp.sum(zeros),
      ),
    )
    return Law(stop=stop, next=target)


traversal = Traversal()
