"""A drafter of trees of fixed shape, made from a drafter of chains.

The topology and the choice of siblings make the tree that of Medusa (Cai et
al., 2401.10774), Hydra (2402.05109), SpecInfer (2305.09781) or Sequoia
(2402.12374).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import drafts
from specsample import indexing
from specsample import sampling
from specsample import sharding
from specsample import tree as tree_lib
from specsample.drafters import signals as signals_lib
from specsample.drafters import steps
from specsample.drafters import wrapper
from specsample.types import Array, Draft, DraftKind, Signals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(wrapper.Wrapper):
  """A drafter that gives each node the children it has in a topology.

  Attributes:
    drafter: drafts as many tokens as the tree is deep.
    topology: the shape of the tree.
    kind: how siblings are chosen. POINT_MASS takes the most likely tokens, in
      that order, which needs no probabilities (Medusa, Hydra, EAGLE); the other
      kinds draw them as `types.DraftKind` says (SpecInfer, Sequoia, greedy
      draft sampling).
  """

  drafter: Any  # a steps.Steps
  topology: tree_lib.Topology
  kind: DraftKind = DraftKind.POINT_MASS

  def _check(self):
    steps.check_branches(self.drafter)
    checks.instance(
      'Tree.topology',
      self.topology,
      tree_lib.Topology,
      'give one of specsample.tree, such as tree.k_ary((2, 1))',
    )
    found = self.drafter.num_draft_tokens
    if not self.topology.num_nodes or found != self.topology.depth:
      raise ValueError(
        f'the tree is {self.topology.depth} levels deep, but the drafter '
        f'drafts {found} tokens: set its num_draft_tokens to the depth of the '
        'tree'
      )

  @property
  def num_draft_tokens(self) -> int:
    """N, the number of nodes."""
    return self.topology.num_nodes

  @property
  def depth(self) -> int:
    """The depth of the longest path, the most drafts that a round keeps."""
    return self.topology.depth

  def init(self, params, batch_size, max_length):
    num_extended = sum(map(bool, self.topology.num_children[1:]))
    return self.drafter.init_tree(params, batch_size, max_length, num_extended)

  def propose(self, params, draw, warp, tokens, length, state):
    topology, batch = self.topology, tokens.shape[0]
    logits, carry = self.drafter.root(params, tokens, length, state)
    nothing = jnp.full((batch, topology.num_nodes), -1, jnp.int32)
    drafted = sharding.constrain(nothing, 'batch', None)
    of_nodes: dict[int, Array] = {}
    signals: dict[int, Signals] = {}
    # The nodes that get children, by their numbers in the topology.
    grown, level = [0], [0]
    for depth in range(1, topology.depth + 1):
      if self.kind is DraftKind.POINT_MASS:
        chosen, said = self._most_likely(params, logits, level, carry)
      else:
        wide = self.drafter.widen(params, logits)
        chosen, found = self._drawn(draw, warp, length, wide, level, drafted)
        of_nodes |= found
        said = self._signals(params, wide, level, chosen, carry)
      signals |= said
      for node, token in chosen.items():
        drafted = drafted.at[:, node - 1].set(token)
      level = [n for n in topology.level(depth) if topology.num_children[n]]
      if level:
        grown += level
        parents = [grown.index(topology.parents[n - 1]) for n in grown[1:]]
        new = drafted[:, jnp.asarray(level) - 1]
        logits, carry = self.drafter.next(
          params, jnp.maximum(new, 0), drafts.of_all_rows(parents, batch), carry
        )
    stack = lambda *x: jnp.stack(x, axis=1)
    in_order = lambda x: [x[i + 1] for i in range(topology.num_nodes)]
    draft = Draft(
      tokens=drafted,
      probs=stack(*in_order(of_nodes)) if of_nodes else None,
      kind=self.kind,
      parents=drafts.of_all_rows(topology.parents, batch),
      depth=topology.depth,
      num_children=topology.num_children,
      signals=jax.tree.map(stack, *in_order(signals)),
    )
    # A missing node has no children either.
    return drafts.cut(draft, drafted >= 0), self.drafter.end(carry, state)

  def _most_likely(self, params, logits, level, carry):
    """Picks the tokens [B] of a level's children from logits [B, n, V'].

    Returns the tokens and the signals, by node.
    """
    most = max(self.topology.num_children[node] for node in level)
    steps.check_siblings(most, logits)
    values, ids = indexing.top_k(logits, most)
    # A drafter may have fewer tokens to offer, or none for now.
    tokens = self.drafter.target_ids(params, ids)
    tokens = jnp.where(jnp.isfinite(values), tokens, -1)
    of_children = lambda found: {
      child: found[:, i, rank]
      for i, node in enumerate(level)
      for rank, child in enumerate(self.topology.children(node))
    }
    said = self._signals(params, logits, level, of_children(ids), carry)
    return of_children(tokens), said

  def _signals(self, params, logits, level, tokens, carry):
    """Returns the signals of a level's children, from logits [B, n, V]."""
    confidence = self.drafter.confidence(params, carry)
    of_node = lambda i: jax.tree.map(lambda x: x[:, i], confidence)
    return {
      child: signals_lib.of_tokens(logits[:, i], tokens[child], of_node(i))
      for i, node in enumerate(level)
      for child in self.topology.children(node)
    }

  def _drawn(self, draw, warp, length, logits, level, drafted):
    """Draws a level's children; returns tokens [B] and probs [B, V] of each."""
    tokens, of_nodes = {}, {}
    for i, node in enumerate(level):
      path = [n - 1 for n in self._path(node)]
      left = warp(logits[:, i], drafted[:, jnp.asarray(path, jnp.int32)])
      children = self.topology.children(node)
      for child in children:
        probs = left
        if self.kind is DraftKind.TOP_AND_SAMPLED and child != children[-1]:
          probs = _is(jax.vmap(sampling.most_likely)(left), left)
          probs = probs.astype(left.dtype)
        mass = jnp.sum(left, axis=-1)
        probs = jnp.where(mass[:, None] > 0, probs, 0)
        token = draw(probs, length + len(path), child)
        tokens[child] = jnp.where(mass > 0, token, -1)
        of_nodes[child] = probs
        if self.kind is not DraftKind.SAMPLED:
          left = _without(left, token)
    return tokens, of_nodes

  def _path(self, node):
    """Returns the nodes on the way to a node, ending with it."""
    path: list[int] = []
    while node:
      path.insert(0, node)
      node = self.topology.parents[node - 1]
    return path


def _is(token, probs):
  """Returns where a token [B] is in probs [B, V], which may be sharded."""
  return indexing.vocab_ids(probs.shape[-1]) == token[:, None]


def _without(probs, token):
  """Renormalises probs [B, V] without a token [B]; all 0 if nothing is left."""
  left = jnp.where(_is(token, probs), 0, probs)
  mass = jnp.sum(left, axis=-1, keepdims=True)
  return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1), 0)
