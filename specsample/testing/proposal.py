"""All drafts that can follow a string, with their probabilities."""

from collections.abc import Callable
import dataclasses

import numpy as np

from specsample import tree as tree_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing.conditional import Conditional
from specsample.tree import Topology
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Drafts:
  """The D drafts that can follow each of n strings."""

  tokens: np.ndarray  # [n, D, N] int32, -1 where nothing was drafted
  probs: np.ndarray | None  # [n, D, N, V], as the verifier gets them
  weights: np.ndarray  # [n, D], the probability that this draft is drawn
  kind: DraftKind
  topology: Topology | None = None  # None for a chain, where N = K


# proposal(t) -> the drafts after every string of t tokens.
Proposal = Callable[[int], Drafts]
# cut(tokens [..., K], probs [..., K, V]) -> how many tokens [...] are kept.
Cut = Callable[[np.ndarray, np.ndarray], np.ndarray]


def keep_all(tokens: np.ndarray, probs: np.ndarray) -> np.ndarray:
  """Keeps every token: the `Cut` that cuts nothing."""
  del probs
  return np.full(tokens.shape[:-1], tokens.shape[-1])


def sampled(
  draft: Conditional, num_draft_tokens: int, cut: Cut = keep_all
) -> Proposal:
  """Returns a proposal that draws each token from `draft`, given its prefix.

  Args:
    draft: the distributions, which the verifier is told.
    num_draft_tokens: K.
    cut: shortens the draft. It must be non-anticipating: whether token i is
      kept depends only on the tokens before i and the distributions up to i.
  """

  def propose(t):
    vocab_size = draft(0, 0).shape[-1]
    paths = conditional_lib.strings(vocab_size, num_draft_tokens)
    tokens = np.broadcast_to(paths, (vocab_size**t, *paths.shape))
    before_last = tree_lib.chain(num_draft_tokens - 1)
    probs = conditional_lib.at_nodes(draft, t, tokens, before_last)
    drawn = np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    kept = np.arange(num_draft_tokens) < cut(tokens, probs)[..., None]
    return Drafts(
      tokens=np.where(kept, tokens, -1),
      probs=np.where(kept[..., None], probs, 0),
      weights=drawn.prod(axis=-1),
      kind=DraftKind.SAMPLED,
    )

  return propose


def most_likely(
  draft: Conditional, num_draft_tokens: int, cut: Cut = keep_all
) -> Proposal:
  """Returns a proposal of point masses: the most likely token at each position.

  Args:
    draft: the distributions.
    num_draft_tokens: K.
    cut: shortens the draft; for a point mass every cut is non-anticipating.
  """

  def propose(t):
    vocab_size = draft(0, 0).shape[-1]
    path = np.arange(vocab_size**t)
    tokens, probs = [], []
    for i in range(num_draft_tokens):
      probs.append(draft(t + i, t)[path])
      tokens.append(probs[-1].argmax(axis=-1))
      path = path * vocab_size + tokens[-1]
    drafted = np.stack(tokens, axis=-1).astype(np.int32)[:, None]
    num_kept = cut(drafted, np.stack(probs, axis=-2)[:, None])
    kept = np.arange(num_draft_tokens) < num_kept[..., None]
    return Drafts(
      tokens=np.where(kept, drafted, -1),
      probs=None,
      weights=np.ones(drafted.shape[:2]),
      kind=DraftKind.POINT_MASS,
    )

  return propose


def tree(draft: Conditional, topology: Topology, kind: DraftKind) -> Proposal:
  """Returns a proposal of trees whose siblings are of the given kind.

  A child for which `draft` has no token left is missing, with all its
  descendants.
  """

  def propose(t):
    vocab_size = draft(0, 0).shape[-1]
    paths = conditional_lib.strings(vocab_size, topology.num_nodes)
    tokens = np.tile(paths, (vocab_size**t, 1, 1))
    at_nodes = conditional_lib.at_nodes(draft, t, tokens, topology)
    probs = np.zeros((*tokens.shape, vocab_size))
    weights = np.ones(tokens.shape[:2])
    is_there = np.ones((*tokens.shape[:2], topology.num_nodes + 1), bool)
    for i, parent in enumerate(topology.parents):
      of_node = _of_child(at_nodes, tokens, topology, i, kind)
      mass = of_node.sum(axis=-1)
      there = is_there[..., parent] & (mass > 0)
      is_there[..., i + 1] = there
      of_node = of_node / np.where(mass > 0, mass, 1)[..., None]
      probs[..., i, :] = np.where(there[..., None], of_node, 0)
      token = tokens[..., i, None]
      drawn = np.take_along_axis(of_node, token, axis=-1)[..., 0]
      # One string counts among those that differ only in missing nodes.
      weights *= np.where(there, drawn, token[..., 0] == 0)
    tokens = np.where(is_there[..., 1:], tokens, -1)
    if kind is not DraftKind.POINT_MASS:
      return Drafts(tokens, probs, weights, kind, topology)
    best = weights.argmax(axis=1)[:, None]
    tokens = np.take_along_axis(tokens, best[..., None], axis=1)
    return Drafts(tokens, None, np.ones(best.shape), kind, topology)

  return propose


def _of_child(at_nodes, tokens, topology, i, kind):
  """Returns the distribution [n, D, V] of node i + 1, not yet normalised."""
  parent = topology.parents[i]
  probs = at_nodes[..., parent, :].copy()
  siblings = [j for j, other in enumerate(topology.parents) if other == parent]
  if kind is DraftKind.SAMPLED:
    return probs
  for j in siblings[: topology.ranks[i]]:
    np.put_along_axis(probs, tokens[..., j, None], 0, axis=-1)
  is_drawn = kind is DraftKind.WITHOUT_REPLACEMENT or (
    kind is DraftKind.TOP_AND_SAMPLED and i == siblings[-1]
  )
  if is_drawn:
    return probs
  best = probs.argmax(axis=-1)[..., None] == np.arange(probs.shape[-1])
  return np.where(best & (probs > 0), 1.0, 0.0)
