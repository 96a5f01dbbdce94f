"""Mistakes that only trees allow: in rules, in drafts and in models."""

import dataclasses

import jax
import jax.numpy as jnp

from experiments.certificate.planted import drafters
from specsample import drafts
from specsample import verify
from specsample.drafter import Drafter
from specsample.drafters import lattice as lattice_lib
from specsample.drafters import LatticeTree
from specsample.testing.hash_model import HashModel
from specsample.types import DraftKind, Law
from specsample.verify import rule


def same_residual(draft, target_probs):
  """Tests every child against the target, whatever was rejected before."""
  law = verify.tree.law(draft, target_probs)
  own = draft.tokens.size
  # The acceptance probability of each child, as if it had no siblings.
  alone = [
    verify.tree.law(
      dataclasses.replace(
        draft,
        tokens=draft.tokens[i : i + 1],
        probs=None if draft.probs is None else draft.probs[i : i + 1],
        parents=jnp.zeros(1, jnp.int32),
        depth=1,
      ),
      target_probs[draft.parents[i]][None].repeat(2, axis=0),
    ).stop[1]
    for i in range(own)
  ]
  stop = rule.stop_in_tree(draft.parents, jnp.stack(alone))
  return dataclasses.replace(law, stop=stop)


def draws_for_each_child(draft, target_probs):
  """Draws from the target again for each child, which is kept if it is equal.

  A node with several children then emits the draw for the last one. One draw
  for all of them would be right.
  """
  parents = draft.parents
  own = rule.of_children(target_probs, draft)
  has_later = jnp.any(rule.is_sibling_before(parents), axis=0)
  last = rule.child_tokens(parents, draft.tokens, ~has_later)
  is_last = last[:, None] == jnp.arange(target_probs.shape[1])
  return Law(
    stop=rule.stop_in_tree(parents, own),
    next=rule.normalise(jnp.where(is_last, 0, target_probs), target_probs),
  )


def only_first_siblings(draft, target_probs):
  """Rejects all children but the first one of each node.

  The distribution is right, but drafts are given away.
  """
  is_first = rule.siblings_before(draft.parents) == 0
  tokens = jnp.where(is_first, draft.tokens, -1)
  return verify.tree.law(
    dataclasses.replace(draft, tokens=tokens), target_probs
  )


def second_as_the_first(topology, draft):
  """Declares siblings drawn without replacement to be independent.

  Each sibling gets the distribution of the first one.
  """
  first = [topology.parents.index(p) for p in topology.parents]
  probs = draft.probs[:, jnp.asarray(first)]
  return dataclasses.replace(draft, probs=probs, kind=DraftKind.SAMPLED)


def likelier_first(topology, draft):
  """Sorts two drawn siblings by their probability, in trees of two leaves."""
  del topology
  own = jnp.take_along_axis(
    draft.probs, jnp.maximum(draft.tokens, 0)[..., None], axis=-1
  )[..., 0]
  order = jnp.argsort(-own, axis=1)
  tokens = jnp.take_along_axis(draft.tokens, order, axis=1)
  return dataclasses.replace(draft, tokens=tokens)


def beam_as_sample(topology, draft):
  """Declares that the most likely tokens were drawn from their distribution.

  Siblings become the most likely tokens of the first one's distribution.
  """
  first = [topology.parents.index(p) for p in topology.parents]
  ranks = jnp.asarray(topology.ranks)
  order = jnp.argsort(-draft.probs[:, jnp.asarray(first)], axis=-1)
  tokens = jnp.take_along_axis(
    order, jnp.broadcast_to(ranks, draft.tokens.shape)[..., None], axis=-1
  )[..., 0]
  return dataclasses.replace(draft, tokens=tokens.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class _Independent(Drafter):
  """A drafter of two of three tokens, each drawn without seeing the other."""

  num_draft_tokens: int = 2

  def probs(self, tokens, length):
    """Returns the probabilities of both tokens after the pending one."""
    pending = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    place = 3 * jnp.arange(2)[:, None] + jnp.arange(3)
    return jax.nn.softmax(2 * jnp.cos(pending[..., None] + 2.0 * place))

  def lattice(self, params, tokens, length, state, num_candidates):
    del params, state, num_candidates
    log_probs = jnp.log(self.probs(tokens, length))
    return lattice_lib.Lattice(
      ids=jnp.broadcast_to(jnp.arange(3), log_probs.shape),
      log_probs=jnp.stack([log_probs] * 3, axis=2),
    )

  def propose(self, params, draw, warp, tokens, length, state):
    """See `Drafter`: the best chain."""
    chain = LatticeTree(drafter=self, num_draft_tokens=2, candidates=1)
    return chain.propose(params, draw, warp, tokens, length, state)


LATTICE_TREE = LatticeTree(
  drafter=_Independent(), num_draft_tokens=4, candidates=3
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatticeAsSample(drafters.Wrapper):
  """Declares the best paths of `LATTICE_TREE` to be drawn from its lattice."""

  def propose(self, params, draw, warp, tokens, length, state):
    draft, state = super().propose(params, draw, warp, tokens, length, state)
    law = self.drafter.drafter.probs(tokens, length)
    position = drafts.depths(draft) - 1
    probs = jnp.take_along_axis(law, position[..., None], axis=1)
    draft = dataclasses.replace(draft, probs=probs, kind=DraftKind.SAMPLED)
    return draft, state


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeesSiblings(HashModel):
  """A model in which a node sees all nodes before it, also on other paths."""

  def read(self, params, tokens, cache, features=(), parents=None):
    if parents is not None:
      # Not left out altogether, which the loop would refuse.
      parents = 0 * parents + jnp.arange(parents.shape[1])
    return super().read(params, tokens, cache, features, parents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepsTheFirstNodes(HashModel):
  """A model that keeps a tree's first nodes, not those of the accepted path."""

  def append(self, cache, new, path=None):
    if path is not None:  # left out altogether, the loop would refuse it
      new = new + 0 * jnp.sum(path).astype(new.dtype)
    return super().append(cache, new)
