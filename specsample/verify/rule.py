"""What verification rules share. Everything here is for one sequence."""

import jax
import jax.numpy as jnp

from specsample import indexing
from specsample import sampling
from specsample import sharding
from specsample import streams
from specsample import tree
from specsample import types
from specsample.types import Array, Draft, Law, Verdict

# Of drafts of which none has a sibling.
CHAIN_LAWS = frozenset([types.DraftLaw.POINT_MASS, types.DraftLaw.SAMPLED])


def check_chain(
  name: str, draft: Draft, exact: frozenset[types.DraftLaw]
) -> None:
  """As `check_law`, and refuses a tree too."""
  if draft.parents is not None:
    raise ValueError(
      f'verify.{name} is for chains, and the draft is a tree of '
      f'{draft.tokens.size} nodes: choose a verifier of trees, such as '
      'verify.tree'
    )
  check_law(name, draft, exact)


def check_law(
  name: str, draft: Draft, exact: frozenset[types.DraftLaw]
) -> None:
  """Refuses a draft whose law the rule is not exact for.

  Raises:
    ValueError: at trace time, naming the law and those that are accepted.
  """
  if draft.law not in exact:
    accepted = sorted(law.value for law in exact)
    raise ValueError(
      f'verify.{name} is not exact for drafts of law {draft.law.value!r}, only '
      f'for {accepted}: choose a verifier made for this drafter'
    )
  if (draft.probs is None) != (draft.law is types.DraftLaw.POINT_MASS):
    given = 'no' if draft.probs is None else 'an array of'
    raise ValueError(
      f'a draft of law {draft.law.value!r} came with {given} probabilities: '
      'a point mass has probs=None, a sampled draft the distribution of each '
      'token'
    )


def draft_probs(draft: Draft, target_probs: Array) -> Array:
  """The law [K, V] of each drafted token: zeros where nothing was drafted."""
  if draft.probs is not None:
    return draft.probs
  return jax.nn.one_hot(
    draft.tokens, target_probs.shape[-1], dtype=target_probs.dtype
  )


def of_tokens(probs: Array, tokens: Array) -> Array:
  """The probability [K] of each of tokens [K]; 0 for token -1."""
  chosen = indexing.pick(probs, jnp.maximum(tokens, 0))
  return jnp.where(tokens >= 0, chosen, 0)


def of_children(probs: Array, draft: Draft) -> Array:
  """What the rows [N + 1, V] of the nodes before have of each token, [N]."""
  before, tokens = parents(draft), draft.tokens
  if sharding.is_divided(sharding.Axis('vocab', probs.shape[-1])):
    return of_tokens(jnp.take(probs, before, axis=0), tokens)
  # Not a copy of the rows.
  return jnp.where(tokens >= 0, probs[before, jnp.maximum(tokens, 0)], 0)


def ratio(numerator: Array, denominator: Array) -> Array:
  """numerator / denominator, 0 where the denominator is 0."""
  is_zero = denominator == 0
  return jnp.where(is_zero, 0, numerator / jnp.where(is_zero, 1, denominator))


def stop_at_rejection(accept: Array) -> Array:
  """Probabilities [K + 1] of how many drafts precede the first rejected one.

  `accept` [K] are those of accepting each draft once it is reached.
  """
  one = jnp.ones(1, accept.dtype)
  reached = jnp.cumprod(jnp.concatenate([one, accept]))
  return reached * (1 - jnp.concatenate([accept, 0 * one]))


def token_by_token(
  draft: Draft, target_probs: Array, lenience: float = 1
) -> Law:
  """The law of a chain whose drafts are accepted in turn.

  Each with probability min(1, target / (lenience * draft)). After a rejection
  the next token follows (target - draft)+, normalised; after K accepted drafts,
  the target.

  Args:
    draft: a chain.
    target_probs: [K + 1, V].
    lenience: more than 0; less than 1 is lossy.
  """
  of_drafts = draft_probs(draft, target_probs)
  accept = jnp.minimum(
    ratio(
      of_tokens(target_probs[:-1], draft.tokens),
      lenience * of_tokens(of_drafts, draft.tokens),
    ),
    1,
  )
  residual = jnp.maximum(target_probs[:-1] - of_drafts, 0)
  return Law(
    stop=stop_at_rejection(accept),
    next=jnp.concatenate(
      [normalise(residual, target_probs[:-1]), target_probs[-1:]]
    ),
  )


def no_drafts(target_probs: Array) -> Law:
  """The law of a round without drafts: the target's own, [1, V]."""
  return Law(stop=jnp.ones(1, target_probs.dtype), next=target_probs)


def stop_in_tree(parents: Array, accept: Array) -> Array:
  """Probabilities [N + 1] of the node at which the accepted drafts end.

  Args:
    parents: [N], the node before each.
    accept: [N], of accepting each draft once its parent is, and none of its
      earlier siblings.
  """

  def visit(i, stop):
    # Of being at a node with no child accepted yet.
    here = stop[parents[i]]
    stop = stop.at[i + 1].set(here * accept[i])
    return stop.at[parents[i]].set(here * (1 - accept[i]))

  # Not a constant: mapped over a divided batch, a loop takes none.
  start = jnp.pad(0 * accept, (1, 0), constant_values=1)
  return jax.lax.fori_loop(0, parents.size, visit, start)


def child_rows(parents: Array, rows: Array, which: Array) -> Array:
  """Of each node the row of one of its children, zeros where there is none.

  Args:
    parents: [N], the node before each.
    rows: [N, V], of the drafts.
    which: [N] bool, at most one child of each node.
  """
  nodes = jnp.arange(parents.size + 1)
  is_it = (parents == nodes[:, None]) & which  # [N + 1, N]
  found = jnp.argmax(is_it, axis=1)
  own = jnp.take(rows, found, axis=0)
  return jnp.where(jnp.any(is_it, axis=1)[:, None], own, 0)


def child_tokens(parents: Array, tokens: Array, which: Array) -> Array:
  """As `child_rows`, of tokens [N]: [N + 1], -1 where there is no child."""
  nodes = jnp.arange(parents.size + 1)
  is_it = (parents == nodes[:, None]) & which
  return jnp.max(jnp.where(is_it, tokens, -1), axis=1)


def is_sibling_before(parents: Array) -> Array:
  """[N, N]: at [i, j], whether node j is a sibling that comes before i."""
  earlier = jnp.tri(parents.size, k=-1, dtype=bool)
  return (parents == parents[:, None]) & earlier


def siblings_before(parents: Array) -> Array:
  """How many siblings come before each node, [N]."""
  return jnp.sum(is_sibling_before(parents), axis=1)


def normalise(weights: Array, fallback: Array) -> Array:
  """Weights [..., V] scaled to sum 1; rows that sum to 0 are the fallback's."""
  mass = jnp.sum(weights, axis=-1, keepdims=True)
  return jnp.where(mass > 0, ratio(weights, mass), fallback)


def draw(key: Array, draft: Draft, law: Law) -> Verdict:
  """One draw of (stop, next token) from a law."""
  node = sampling.draw(streams.accept_key(key), law.stop)
  has_drafts = jnp.any((parents(draft) == node) & (draft.tokens >= 0))
  next_key = jnp.where(
    has_drafts, streams.residual_key(key), streams.bonus_key(key)
  )
  probs = indexing.row(law.next, node, None)
  next_token = sampling.draw(next_key, probs)
  if draft.parents is None:
    return Verdict(num_accepted=node, next_token=next_token)
  depth = draft.tokens.size if draft.depth is None else draft.depth
  path = tree.path_to(tree.ancestors(draft.parents), node, depth)
  return Verdict(
    num_accepted=jnp.sum(path > 0), next_token=next_token, path=path
  )


def num_children(draft: Draft) -> tuple[int, ...]:
  """The most children that each node may have, [N + 1]."""
  size = draft.tokens.size
  if draft.parents is None:
    return (1,) * size + (0,)
  return draft.num_children or (size,) * (size + 1)


def without_children(probs: Array, draft: Draft) -> Array:
  """Rows [N + 1, V], 0 where a node has a child with that token."""
  before, tokens = parents(draft), draft.tokens
  vocab_size = probs.shape[-1]
  if not sharding.is_divided(sharding.Axis('vocab', vocab_size)):
    # A draft that is not there is no token.
    column = jnp.where(tokens >= 0, tokens, vocab_size)
    return probs.at[before, column].set(0, mode='drop')
  # A scatter would gather a divided vocabulary.
  rank = siblings_before(before)
  vocab_ids = indexing.vocab_ids(vocab_size)

  def visit(i, left):
    token = child_tokens(before, tokens, rank == i)
    return jnp.where(vocab_ids == token[:, None], 0, left)

  return jax.lax.fori_loop(0, max(num_children(draft)), visit, probs)


def parents(draft: Draft) -> Array:
  """The node before each, [N], of a chain too."""
  if draft.parents is None:
    return jnp.arange(draft.tokens.size)
  if draft.parents.shape != draft.tokens.shape:
    raise ValueError(
      f'the draft has tokens {draft.tokens.shape} and parents '
      f'{draft.parents.shape}: name the node before each'
    )
  return draft.parents
