"""Theoretical acceptance of the rules, computed without their `.law`.

Everything is for the first round after the prompt. Each rule has a function
that returns [depth]: the probability of keeping at least 1, 2, ... drafts. They
add up to the expected number of accepted drafts. p is the target's distribution
after a node, and q the one that a child of it was drawn from. A chain is a tree
in which each node has one child.
"""

from collections.abc import Callable

import numpy as np

from specsample import tree as tree_lib
from specsample.testing import conditional as conditional_lib
from specsample.testing.conditional import Conditional
from specsample.testing.proposal import Proposal
from specsample.types import DraftKind

# of_children(p [V], the q [V] of each child, kind) -> [children, V]: the
# probability that a child is kept and has this token, over all draws.
_OfChildren = Callable[[np.ndarray, list[np.ndarray], DraftKind], np.ndarray]


def tree(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Keeps min(p, q) of each child in turn; a rejection leaves (p - q)+ of p.

  A child's test is reached with the probability that all before it fail. What
  has failed matters without replacement, where it is missing in the next q
  (Miao et al., 2305.09781; Chen et al., 2402.12374, Algorithm 2). In a chain
  this is the token rule: the sum of prod min(p, q) over the prefixes.
  """
  return _from_root(proposal, target, _in_turn)


def k_seq(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Keeps min(q, p / rho) of each child in turn, while all before it fail.

  With beta = sum min(q, p / rho), some child of k is kept with probability
  1 - (1 - beta)^k; rho is the smallest for which this is at most rho beta
  (Sun et al., 2310.15141, Algorithm 2).
  """
  return _from_root(proposal, target, _discounted)


def greedy_draft(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Keeps p of each of the most likely children, and min(p, q) of the last.

  The last child's q is 0 at its siblings. The residual (p - q)+ thus holds all
  of p there, and its mass is the probability that the last child is rejected
  (Hu et al., 2502.18779, section 5).
  """

  def of_children(target_probs, drawn, kind):
    del kind
    *best, last = drawn
    return np.stack(
      [probs * target_probs for probs in best]
      + [np.minimum(target_probs, last)]
    )

  return _from_root(proposal, target, of_children)


def multi_path_block(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Keeps the chosen path up to a node with a = min(1, a_parent p / chosen).

  Let l(x) be the mass of q on tokens later than x in the order of falling
  p / q. Of k i.i.d. children, child i is the first of the best and has token x
  with probability q(x) l(x)^(i - 1) (l(x) + q(x))^(k - i). These add up to
  chosen(x), and block verification keeps at least a prefix with probability a
  (Sun et al., 2403.10444; Thomas and Pal, 2602.16961). In a chain chosen is q,
  so at least a prefix is drafted and kept with m = min(m_parent p, prod q).
  """
  drafts = _Drafts(proposal, target)
  at_least = np.zeros(drafts.depth)

  def visit(node, path, reached, share):
    target_probs, children, drawn = drafts.after(node, path)
    if not children:
      return
    order = np.argsort(-_ratio(target_probs, drawn[0]), kind='stable')
    later = np.empty(order.size)
    later[order] = 1 - np.cumsum(drawn[0][order])
    more, last = later + drawn[0], len(children) - 1
    first = [drawn[0] * later**i * more ** (last - i) for i in range(last + 1)]
    shares = np.minimum(share * _ratio(target_probs, sum(first)), 1)
    for child, own in zip(children, first, strict=True):
      at_least[len(path)] += reached * own @ shares
      for x in np.flatnonzero(own):
        visit(child, (*path, x), reached * own[x], shares[x])

  visit(0, (), 1.0, 1.0)
  return at_least


def traversal(proposal: Proposal, target: Conditional) -> np.ndarray:
  """Visits the nodes of each draft in post-order, and sums over the drafts.

  A node with token x has a = min(1, a_parent p(x) / q(x)). After each child,
  (a p - q)+ with mass S takes the place of p and S / (S + 1 - a) that of a,
  which stays 1 at the root; after the last child, the node is kept with
  probability a, unless another was before (Weng et al., 2505.12398).
  """
  drafts = _Drafts(proposal, target)
  found = [drafts.weights[row] * _traversed(drafts, row) for row in drafts.rows]
  return np.sum(found, axis=0)


def _traversed(drafts, row):
  at_least = np.zeros(drafts.depth)

  def visit(node, path, a, remaining):
    target_probs, children, drawn = drafts.after(node, path, row)
    for child, probs in zip(children, drawn, strict=True):
      x = drafts.tokens[row, child - 1]
      own = min(1.0, a * target_probs[x] / probs[x])
      remaining = visit(child, (*path, x), own, remaining)
      residual = np.maximum(a * target_probs - probs, 0)
      mass = residual.sum()
      if node:
        a = mass / (mass + 1 - a) if mass + 1 - a else 1.0
      target_probs = residual / mass if mass else target_probs
    at_least[: len(path)] += remaining * a
    return remaining * (1 - a)

  visit(0, (), 1.0, 1.0)
  return at_least


def coupled(
  draft: Conditional, target: Conditional, num_draft_tokens: int
) -> np.ndarray:
  """Multiplies the probabilities that both sides choose the same token.

  With shared Gumbel noise both choose x with probability
  1 / sum_y max(target_y / target_x, draft_y / draft_x), independently at each
  position (Daliri et al., 2408.07978).
  """
  both = np.ones(1)
  at_least = np.empty(num_draft_tokens)
  for t in range(num_draft_tokens):
    both = (both[:, None] * _match(target(t, 0), draft(t, 0))).reshape(-1)
    at_least[t] = both.sum()
  return at_least


def law(at_least: np.ndarray) -> np.ndarray:
  """Returns the distribution [K + 1] of the number of kept drafts."""
  return -np.diff(at_least, prepend=1, append=0)


def _match(target, draft):
  possible = (target > 0) & (draft > 0)
  ratios = lambda probs: (
    probs[:, None, :] / np.where(possible, probs, 1)[:, :, None]
  )
  larger = np.maximum(ratios(target), ratios(draft)).sum(axis=-1)
  return np.where(possible, 1 / larger, 0)


class _Drafts:
  """The drafts of the first round, and the target after each of their nodes."""

  def __init__(self, proposal: Proposal, target: Conditional):
    drafts = proposal(0)
    num_nodes = drafts.tokens.shape[-1]
    self._topology = drafts.topology or tree_lib.chain(num_nodes)
    self.kind, self.depth = drafts.kind, self._topology.depth
    self.tokens, self.weights = drafts.tokens[0], drafts.weights[0]
    self.rows = np.flatnonzero(self.weights)
    self._probs = None if drafts.probs is None else drafts.probs[0]
    self._target = target

  def after(self, node, path, row=None):
    """Returns p, the children that are there, and the q of each.

    Without a row, these are of the first draft that has this path to the node.
    """
    if row is None:
      row = self._first(node, path)
    table = self._target(len(path), 0)
    vocab_size = table.shape[1]
    target_probs = table[
      conditional_lib.index(np.asarray(path, int), vocab_size)
    ]
    is_there = self.tokens[row] >= 0
    children = [x for x in self._topology.children(node) if is_there[x - 1]]
    probs = np.eye(vocab_size)[self.tokens[row]]
    if self._probs is not None:
      probs = self._probs[row]
    return target_probs, children, [probs[child - 1] for child in children]

  def _first(self, node, path):
    fits = np.ones(self.rows.size, bool)
    for x in reversed(path):
      fits &= self.tokens[self.rows, node - 1] == x
      node = self._topology.parents[node - 1]
    return self.rows[fits.argmax()]


def _from_root(
  proposal: Proposal, target: Conditional, of_children: _OfChildren
) -> np.ndarray:
  """Multiplies along paths, for rules that decide node by node."""
  drafts = _Drafts(proposal, target)
  at_least = np.zeros(drafts.depth)

  def visit(node, path, reached):
    target_probs, children, drawn = drafts.after(node, path)
    if not children:
      return
    kept = reached * of_children(target_probs, drawn, drafts.kind)
    at_least[len(path)] += kept.sum()
    for child, own in zip(children, kept, strict=True):
      for x in np.flatnonzero(own):
        visit(child, (*path, x), own[x])

  visit(0, (), 1.0)
  return at_least


def _in_turn(target_probs, drawn, kind):
  probs, *later = drawn
  kept = np.minimum(target_probs, probs)
  found = np.zeros((len(drawn), kept.size))
  found[0] = kept
  rest = target_probs - kept
  if not later or rest.sum() <= 0:
    return found
  rest = rest / rest.sum()
  for x in np.flatnonzero(probs > kept):
    if kind is DraftKind.WITHOUT_REPLACEMENT:
      others = np.where(np.arange(kept.size) == x, 0, probs)
      later = [others / others.sum()] * len(later)
    found[1:] += (probs - kept)[x] * _in_turn(rest, later, kind)
  return found


def _discounted(target_probs, drawn, kind):
  del kind  # i.i.d., the only kind that the rule takes
  count = len(drawn)
  kept = lambda rho: np.minimum(drawn[0], target_probs / rho)
  # Falls as rho grows.
  excess = lambda rho: (
    1 - (1 - kept(rho).sum()) ** count - rho * kept(rho).sum()
  )
  low, high = 1.0, float(count)
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if excess(middle) > 0 else (low, middle)
  fails = 1 - kept(high).sum()
  return np.stack([fails**i * kept(high) for i in range(count)])


def _ratio(numerator, denominator):
  is_zero = denominator == 0
  return np.where(is_zero, 0, numerator / np.where(is_zero, 1, denominator))
