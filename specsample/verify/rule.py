"""The base of the verification rules, and what they share.

Everything is for a single sequence.
"""

import abc
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import sampling
from specsample import settings
from specsample import sharding
from specsample import streams
from specsample import tree
from specsample import types
from specsample.types import Array, Draft, Law, Verdict

# The kinds of drafts that chains have.
CHAIN_KINDS = frozenset([types.DraftKind.POINT_MASS, types.DraftKind.SAMPLED])

PositiveShare = Annotated[
  float, settings.rule(lambda x: 0 < x <= 1, 'more than 0 and at most 1')
]


class Rule(settings.Settings, abc.ABC):
  """A `types.Verifier` that draws from its law, with one key per round.

  A subclass says whether it is `lossless`, for which `draft_kinds`, and whether
  it `takes_trees`.
  """

  positional = False
  takes_trees = True
  draft_kinds: Any  # a frozenset[types.DraftKind]

  def law(self, draft: Draft, target_probs: Array) -> Law:
    """Returns the verdict's distribution, given target_probs [N + 1, V].

    Raises:
      ValueError: the rule does not take such a draft.
    """
    self.check(draft)
    if not draft.tokens.size:
      return Law(stop=jnp.ones(1, target_probs.dtype), next=target_probs)
    return self._law(draft, target_probs)

  @abc.abstractmethod
  def _law(self, draft: Draft, target_probs: Array) -> Law:
    """Returns what `law` does, for one draft token or more."""

  def __call__(self, key: Array, draft: Draft, target_probs: Array) -> Verdict:
    return draw(key, draft, self.law(draft, target_probs))

  def check(self, draft: Draft) -> None:
    """Raises ValueError unless the rule takes such a draft."""
    name, kind = type(self).__name__, draft.kind
    if draft.parents is not None and not self.takes_trees:
      raise ValueError(
        f'{name} is for chains, but the draft is a tree of '
        f'{draft.tokens.size} nodes: choose a verifier for trees, such as '
        'verify.tree'
      )
    if kind not in self.draft_kinds:
      accepted = sorted(kind.value for kind in self.draft_kinds)
      raise ValueError(
        f'{name} is not exact for drafts of kind {kind.value!r}, only for '
        f'{accepted}: choose a verifier made for this drafter'
      )
    if (draft.probs is None) != (kind is types.DraftKind.POINT_MASS):
      given = 'no' if draft.probs is None else 'an array of'
      raise ValueError(
        f'a draft of kind {kind.value!r} came with {given} probabilities: a '
        'point mass has probs=None, and a sampled draft has the distribution '
        'of each token'
      )


class ChainRule(Rule):
  """A rule for chains alone."""

  takes_trees = False
  draft_kinds = CHAIN_KINDS


def draft_probs(draft: Draft, target_probs: Array) -> Array:
  """Returns each draft token's distribution [K, V], zeros for padding."""
  if draft.probs is not None:
    return draft.probs
  return jax.nn.one_hot(
    draft.tokens, target_probs.shape[-1], dtype=target_probs.dtype
  )


def of_tokens(probs: Array, tokens: Array) -> Array:
  """Returns the probability [K] of each of tokens [K]; 0 for token -1."""
  chosen = indexing.pick(probs, jnp.maximum(tokens, 0))
  return jnp.where(tokens >= 0, chosen, 0)


def of_children(probs: Array, draft: Draft) -> Array:
  """Returns each draft token's probability [N] in its parent's row of probs.

  `probs` [N + 1, V] has a row per node, the pending token's first.
  """
  before, tokens = parents(draft), draft.tokens
  if sharding.is_divided(sharding.Axis('vocab', probs.shape[-1])):
    return of_tokens(jnp.take(probs, before, axis=0), tokens)
  # Gathers single elements: `take` would copy whole rows.
  return jnp.where(tokens >= 0, probs[before, jnp.maximum(tokens, 0)], 0)


def ratio(numerator: Array, denominator: Array) -> Array:
  """Returns numerator / denominator, or 0 where the denominator is 0."""
  is_zero = denominator == 0
  return jnp.where(is_zero, 0, numerator / jnp.where(is_zero, 1, denominator))


def stop_at_rejection(accept: Array) -> Array:
  """Returns the probability [K + 1] of each number of accepted drafts.

  Drafts are accepted up to the first rejection; `accept` [K] is the probability
  of accepting each draft once it is reached.
  """
  one = jnp.ones(1, accept.dtype)
  reached = jnp.cumprod(jnp.concatenate([one, accept]))
  return reached * (1 - jnp.concatenate([accept, 0 * one]))


def token_by_token(
  draft: Draft, target_probs: Array, lenience: float = 1
) -> Law:
  """Returns the law of `Chain`, or of `Lenient` if `lenience` is below 1."""
  of_drafts = draft_probs(draft, target_probs)
  accept = ratio(
    of_tokens(target_probs[:-1], draft.tokens),
    lenience * of_tokens(of_drafts, draft.tokens),
  )
  residual = jnp.maximum(target_probs[:-1] - of_drafts, 0)
  corrected = normalise(residual, target_probs[:-1])
  return Law(
    stop=stop_at_rejection(jnp.minimum(accept, 1)),
    next=jnp.concatenate([corrected, target_probs[-1:]]),
  )


def stop_in_tree(parents: Array, accept: Array) -> Array:
  """Returns the probability [N + 1] that the accepted drafts end at each node.

  Args:
    parents: [N], the parent of each node.
    accept: [N], the probability of accepting each draft once its parent is
      accepted and its earlier siblings are rejected.
  """

  def visit(i, stop):
    # The probability of being at the parent with no child accepted yet.
    here = stop[parents[i]]
    stop = stop.at[i + 1].set(here * accept[i])
    return stop.at[parents[i]].set(here * (1 - accept[i]))

  # Derived from `accept`: a loop mapped over a sharded batch cannot start from
  # a constant.
  start = jnp.pad(0 * accept, (1, 0), constant_values=1)
  return jax.lax.fori_loop(0, parents.size, visit, start)


def child_rows(parents: Array, rows: Array, which: Array) -> Array:
  """Returns the row [N + 1, V] of one child of each node, zeros for no child.

  Args:
    parents: [N], the parent of each node.
    rows: [N, V], one per draft token.
    which: [N] bool, selects at most one child of each node.
  """
  nodes = jnp.arange(parents.size + 1)
  is_it = (parents == nodes[:, None]) & which  # [N + 1, N]
  found = jnp.argmax(is_it, axis=1)
  own = jnp.take(rows, found, axis=0)
  return jnp.where(jnp.any(is_it, axis=1)[:, None], own, 0)


def child_tokens(parents: Array, tokens: Array, which: Array) -> Array:
  """Returns the token [N + 1] of one child of each node, -1 for no child.

  The arguments are those of `child_rows`, with tokens [N] instead of rows.
  """
  nodes = jnp.arange(parents.size + 1)
  is_it = (parents == nodes[:, None]) & which
  return jnp.max(jnp.where(is_it, tokens, -1), axis=1)


def is_sibling_before(parents: Array) -> Array:
  """Returns [N, N] bool: at [i, j], whether j is an earlier sibling of i."""
  earlier = jnp.tri(parents.size, k=-1, dtype=bool)
  return (parents == parents[:, None]) & earlier


def siblings_before(parents: Array) -> Array:
  """Counts the earlier siblings of each node, [N]."""
  return jnp.sum(is_sibling_before(parents), axis=1)


def normalise(weights: Array, fallback: Array) -> Array:
  """Scales weights [..., V] to sum to 1; uses `fallback` for rows of sum 0."""
  mass = jnp.sum(weights, axis=-1, keepdims=True)
  return jnp.where(mass > 0, ratio(weights, mass), fallback)


def draw(key: Array, draft: Draft, law: Law) -> Verdict:
  """Draws a verdict from a law: where the drafts end, then the next token."""
  node = sampling.draw(streams.accept_key(key), law.stop)
  has_drafts = jnp.any((parents(draft) == node) & (draft.tokens >= 0))
  next_key = jnp.where(
    has_drafts, streams.residual_key(key), streams.bonus_key(key)
  )
  probs = indexing.row(law.next, node, None)
  return verdict_at(draft, node, sampling.draw(next_key, probs))


def verdict_at(draft: Draft, node: Array, next_token: Array) -> Verdict:
  """Returns the verdict that keeps the drafts up to a node, of index []."""
  if draft.parents is None:
    return Verdict(num_accepted=node, next_token=next_token)
  depth = draft.tokens.size if draft.depth is None else draft.depth
  path = tree.path_to(tree.ancestors(draft.parents), node, depth)
  return Verdict(
    num_accepted=jnp.sum(path > 0), next_token=next_token, path=path
  )


def num_children(draft: Draft) -> tuple[int, ...]:
  """Returns the most children that each node may have, [N + 1]."""
  size = draft.tokens.size
  if draft.parents is None:
    return (1,) * size + (0,)
  return draft.num_children or (size,) * (size + 1)


def without_children(probs: Array, draft: Draft) -> Array:
  """Sets probs [N + 1, V] to 0 at the tokens of each node's children."""
  before, tokens = parents(draft), draft.tokens
  vocab_size = probs.shape[-1]
  if not sharding.is_divided(sharding.Axis('vocab', vocab_size)):
    # Padding gets an index past the vocabulary, which `drop` ignores.
    column = jnp.where(tokens >= 0, tokens, vocab_size)
    return probs.at[before, column].set(0, mode='drop')
  # A scatter would gather a sharded vocabulary.
  rank = siblings_before(before)
  vocab_ids = indexing.vocab_ids(vocab_size)

  def visit(i, left):
    token = child_tokens(before, tokens, rank == i)
    return jnp.where(vocab_ids == token[:, None], 0, left)

  return jax.lax.fori_loop(0, max(num_children(draft)), visit, probs)


def parents(draft: Draft) -> Array:
  """Returns the parent of each node, [N], for chains as well as trees."""
  if draft.parents is None:
    return jnp.arange(draft.tokens.size)
  if draft.parents.shape != draft.tokens.shape:
    raise ValueError(
      f'the draft has tokens of shape {draft.tokens.shape} and parents of '
      f'shape {draft.parents.shape}: give the parent of each token'
    )
  return draft.parents
