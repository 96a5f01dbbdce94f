"""Block verification of the best of several independent paths.

The greedy choice of Thomas and Pal (2602.16961), made at each node of a tree.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.types import Draft, Law
from specsample.verify import rule
from specsample.verify.block import block


@dataclasses.dataclass(frozen=True)
class MultiPathBlock(rule.Rule):
  """Descends to the child of highest p(x) / q(x) and verifies that path.

  p is the target's distribution and q the drafter's. Of k i.i.d. children, the
  chosen one is x with probability a^k - b^k. Here a is the drafter's mass on x
  and on all tokens after it in the order of falling ratios, and b is the mass
  on the tokens after x alone. Block verification takes this distribution as
  the one that the path was drawn from. With one child everywhere this is block
  verification. If draft and target are alike, it keeps fewer tokens than `Tree`
  and `Traversal`, which do not favour any token.

  The order is over the whole vocabulary, so a sharded vocabulary is gathered.
  """

  lossless = True
  draft_kinds = frozenset([types.DraftKind.SAMPLED])

  def _law(self, draft, target_probs):
    parents = rule.parents(draft)
    depth = parents.size if draft.depth is None else draft.depth
    draft_probs = rule.draft_probs(draft, target_probs)

    node = jnp.zeros((), jnp.int32)
    path, targets, chosen = [], [], []
    # After a leaf the node is -1 and its token too, so nothing is kept. The
    # loop is unrolled: mapped over a sharded batch, a loop's carry would have
    # to declare its sharding.
    for _ in range(depth):
      target = indexing.row(target_probs, jnp.maximum(node, 0), None)
      is_child = (parents == node) & (draft.tokens >= 0)
      count = jnp.sum(is_child)
      drawn = indexing.row(draft_probs, jnp.argmax(is_child), None)
      drawn = jnp.where(count > 0, drawn, 0)
      place, of_best = _of_best(
        rule.ratio(target, drawn), drawn, count, max(rule.num_children(draft))
      )
      own = jnp.take(place, jnp.maximum(draft.tokens, 0))
      child = 1 + jnp.argmin(jnp.where(is_child, own, place.size))
      node = jnp.where(count > 0, child.astype(jnp.int32), -1)
      path.append(node)
      targets.append(target)
      chosen.append(of_best)
    last = indexing.row(target_probs, jnp.maximum(node, 0), None)
    nodes = jnp.stack(path)
    tokens = jnp.where(nodes > 0, jnp.take(draft.tokens, nodes - 1), -1)
    law = block.law(
      Draft(
        tokens=tokens, probs=jnp.stack(chosen), kind=types.DraftKind.SAMPLED
      ),
      jnp.stack([*targets, last]),
    )
    return _at_nodes(jnp.pad(nodes, (1, 0)), law, target_probs)


multi_path_block = MultiPathBlock()


def _of_best(ratios, probs, count, most):
  """Ranks tokens by ratio and returns the law of the best of `count` draws.

  The draws are i.i.d. from probs [V]; `most` is a static bound on `count`.

  Returns:
    The place [V] of each token in the order of falling ratios, counted from 0
    and with ties in the order of token ids, and the distribution [V] of the
    draw with the highest ratio.
  """
  # A sharded vocabulary cannot be sorted, so the rows on the path are gathered.
  ratios, probs = sharding.replicate((ratios, probs))
  numbers = jnp.arange(probs.size)
  _, order, in_order = jax.lax.sort(
    (-ratios, numbers, probs), num_keys=1, is_stable=True
  )
  place = jnp.zeros_like(numbers).at[order].set(numbers)
  behind = jnp.cumsum(in_order[::-1])[::-1]
  a = jnp.take(behind, place)
  b = jnp.take(jnp.pad(behind, (0, 1)), place + 1)

  # Computes (a^k - b^k) / (a - b) as a sum of products, because subtracting the
  # powers would lose precision to cancellation.
  def add(i, carry):
    total, power = carry
    more = total * a + power, power * b
    return jax.tree.map(lambda x, y: jnp.where(i < count, x, y), more, carry)

  start = (0 * probs, 0 * probs + 1)
  total, _ = jax.lax.fori_loop(0, most, add, start)
  chosen = sharding.constrain(probs * total, sharding.Axis('vocab', probs.size))
  return place, chosen


def _at_nodes(path, law, target_probs):
  """Maps the law of a path [P + 1], padded with -1, to a law of all nodes."""
  nodes = jnp.arange(target_probs.shape[0])
  is_it = path == nodes[:, None]
  there = jnp.any(is_it, axis=1)
  found = jnp.argmax(is_it, axis=1)
  return Law(
    stop=jnp.where(there, jnp.take(law.stop, found), 0),
    next=jnp.where(
      there[:, None], jnp.take(law.next, found, axis=0), target_probs
    ),
  )
