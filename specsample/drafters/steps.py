"""Drafters that draft token by token, and the loop that draws their chains."""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.drafter import Drafter
from specsample.drafters import signals as signals_lib
from specsample.types import (
  Array,
  Draft,
  DrafterState,
  DraftKind,
  Draw,
  Params,
  Warp,
)


class Steps(Drafter):
  """A drafter that says what may follow any of its draft tokens.

  A chain takes `first`, then `next` for each draft token but the last. A tree
  takes `root`, then `next` for each level but the last, over all its nodes that
  get children. `end` closes both. The carry is any pytree that `first` and
  `next` hand on.
  """

  @abc.abstractmethod
  def first(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> tuple[Array, Any]:
    """Returns logits [B, 1, V'] after the pending token, and the carry.

    The arguments are those of `propose`. Rows in which all logits are -inf get
    no draft.
    """

  def init_tree(
    self, params: Params, batch_size: int, max_length: int, num_nodes: int
  ) -> DrafterState:
    """Returns an empty state, as `init` does, for rounds of trees.

    `next` is given at most `num_nodes` nodes per round. `max_length` leaves
    room for them.
    """
    del num_nodes
    return self.init(params, batch_size, max_length)

  def root(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> tuple[Array, Any]:
    """Does the same as `first`, for a tree.

    After a tree, `end` has dropped the entries of all draft tokens, so the kept
    path is read again.
    """
    return self.first(params, tokens, length, state)

  @abc.abstractmethod
  def next(
    self, params: Params, tokens: Array, parents: Array | None, carry: Any
  ) -> tuple[Array, Any]:
    """Returns logits [B, n, V'] after n more draft tokens, and the next carry.

    Args:
      params: the whole tree of parameters.
      tokens: [B, n] int32, the new tokens, 0 where a row has none.
      parents: None for a chain, where n is 1. For a tree [B, W - 1], the
        parents of all nodes so far, the n new ones last. Nodes are numbered in
        the order in which they are given to `next`; 0 is the pending token.
      carry: from the previous call.
    """

  def end(self, carry: Any, state: DrafterState) -> DrafterState:
    """Returns the state as `propose` leaves it."""
    del carry
    return state

  @property
  def num_unrolled(self) -> int:
    """How many calls of `next` return a carry of another structure or shape.

    These are the first ones on a chain. The others run in one compiled loop.
    """
    return 0

  @property
  def stops_early(self) -> bool:
    return not self.num_unrolled

  def confidence(self, params: Params, carry: Any) -> Array | None:
    """Returns a trained estimate [B, n] for drafts from the latest logits.

    See `types.Signals`. None without a head for it.
    """
    del params, carry
    return None

  def target_ids(self, params: Params, ids: Array) -> Array:
    """Maps ids [...] of the V' tokens that are drafted to the target's ids."""
    del params
    return ids

  def widen(self, params: Params, logits: Array) -> Array:
    """Expands logits [..., V'] to [..., V]: -inf for tokens never drafted."""
    del params
    return logits

  def propose(self, params, draw, warp, tokens, length, state):
    """See `Drafter`: K tokens, each drawn after those before it."""
    draft_one = self._drawn_by(params, draw, warp, length)
    num_drafts = self.num_draft_tokens
    logits, carry = self.first(params, tokens, length, state)
    drafted = self._nothing(tokens.shape[0])

    def body(carry, i):
      logits, drafted, inner = carry
      drafted, found = draft_one(logits, drafted, i, inner)
      logits, inner = self.next(params, _taken(drafted, i), None, inner)
      return (logits, drafted, inner), found

    found = []
    last = num_drafts - 1
    num_unrolled = min(self.num_unrolled, last)
    for i in range(num_unrolled):
      (logits, drafted, carry), of_one = body((logits, drafted, carry), i)
      found.append(jax.tree.map(lambda x: x[None], of_one))
    if num_unrolled < last:
      (logits, drafted, carry), of_loop = jax.lax.scan(
        body, (logits, drafted, carry), jnp.arange(num_unrolled, last)
      )
      found.append(of_loop)
    drafted, of_last = draft_one(logits, drafted, last, carry)
    found.append(jax.tree.map(lambda x: x[None], of_last))
    of_all = jax.tree.map(lambda *x: jnp.concatenate(x), *found)
    return _draft(drafted, of_all), self.end(carry, state)

  def propose_while(
    self,
    params: Params,
    draw: Draw,
    warp: Warp,
    tokens: Array,
    length: Array,
    state: DrafterState,
    *,
    goes_on: Callable[[Draft], tuple[Array, Array]],
  ) -> tuple[Draft, DrafterState]:
    """Proposes like `propose`, but stops once no row goes on.

    Args:
      params, draw, warp, tokens, length, state: see `Drafter.propose`.
      goes_on: takes a draft whose first i tokens are drawn; later tokens are
        -1, and their probs and signals are zeros. Returns which tokens stay,
        [B, K], and after which of them more may follow, [B, K]. Neither may
        depend on what is not drawn yet.
    """
    draft_one = self._drawn_by(params, draw, warp, length)
    num_drafts = self.num_draft_tokens
    logits, carry = self.first(params, tokens, length, state)
    drafted, of_first = draft_one(
      logits, self._nothing(tokens.shape[0]), 0, carry
    )
    room = lambda x: jnp.stack([x] + [jnp.zeros_like(x)] * (num_drafts - 1))
    found = jax.tree.map(room, of_first)

    def judged(drafted, found, i):
      """Drops token i in rows where it does not stay; also says which go on."""
      stays, is_open = goes_on(_draft(drafted, found))
      token = jnp.where(stays[:, i], drafted[:, i], -1)
      return drafted.at[:, i].set(token), stays[:, i] & is_open[:, i]

    def cond(carry):
      i, going, *_ = carry
      return (i < num_drafts) & jnp.any(going)

    def body(carry):
      i, going, drafted, found, inner = carry
      logits, inner = self.next(params, _taken(drafted, i - 1), None, inner)
      drafted, new = draft_one(logits, drafted, i, inner, going)
      write = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
      found = jax.tree.map(write, found, new)
      drafted, going = judged(drafted, found, i)
      return i + 1, going, drafted, found, inner

    drafted, going = judged(drafted, found, 0)
    *_, drafted, found, carry = jax.lax.while_loop(
      cond,
      body,
      (jnp.ones((), jnp.int32), going, drafted, found, carry),
    )
    draft = drafts.cut(_draft(drafted, found), drafted >= 0)
    return draft, self.end(carry, state)

  def _nothing(self, batch):
    nothing = jnp.full((batch, self.num_draft_tokens), -1, jnp.int32)
    return sharding.constrain(nothing, 'batch', None)

  def _drawn_by(self, params, draw, warp, length):
    """Returns a function that draws token i after the tokens before it."""

    def draft_one(logits, drafted, i, carry, going=None):
      logits = self.widen(params, logits)[:, 0]
      probs = warp(logits, drafted)
      # A draft ends where its drafter has nothing to offer.
      is_there = jnp.any(logits > -jnp.inf, axis=-1)
      is_there &= jnp.sum(drafted >= 0, axis=1) == i
      if going is not None:
        is_there &= going
      probs = jnp.where(is_there[:, None], probs, 0)
      token = jnp.where(is_there, draw(probs, length + i), -1)
      confidence = self.confidence(params, carry)
      confidence = jax.tree.map(lambda x: x[:, 0], confidence)
      signals = signals_lib.of_tokens(logits, token, confidence)
      return drafted.at[:, i].set(token), (probs, signals)

    return draft_one


@types.pytree
class Slots:
  """What a pass found for all K slots, and the slot that is drafted from."""

  found: Any  # a tree of arrays [B, K, ...]
  previous: Array  # [B, n] int32, the tokens before the slot's
  number: Array  # [] int32, of the slot
  memory: Array | None  # [B, n, ...], after the slot
  state: DrafterState  # as `propose` leaves it


class OnePass(Steps):
  """A drafter that makes all K draft tokens, or most of each, in one pass."""

  @abc.abstractmethod
  def slots(
    self, params: Params, tokens: Array, length: Array, state: DrafterState
  ) -> tuple[Any, DrafterState]:
    """Returns what `given` reads of all slots, [B, K, ...], and the new state.

    The arguments are those of `propose`.
    """

  def initial_memory(self, params: Params, pending: Array) -> Array | None:
    """Returns the memory before the first slot, after pending tokens [...].

    It is [..., n], or None, as here, if drafts depend on no more than one token
    drawn before them.
    """
    del params, pending
    return None

  def given(
    self, params: Params, found: Any, previous: Array, memory: Array | None
  ) -> tuple[Array, Array | None]:
    """Returns logits of slots given the tokens drawn before them.

    Here no draft token depends on the ones drawn before it.

    Args:
      params: the whole tree of parameters.
      found: from `slots`, [..., n] each; here it is the logits.
      previous: [...] int32, the tokens before the slots'.
      memory: [..., n] or None, after the slots before.

    Returns:
      The logits [..., V'], and the memory after the slots.
    """
    del params, previous
    return found, memory

  def first(self, params, tokens, length, state):
    found, state = self.slots(params, tokens, length, state)
    last = pending(tokens, length)
    carry = Slots(
      found=found,
      previous=last,
      number=jnp.zeros((), jnp.int32),
      memory=self.initial_memory(params, last),
      state=state,
    )
    return self._of_slot(params, carry)

  def root(self, params, tokens, length, state):
    return self.first(params, tokens, length, state)

  def next(self, params, tokens, parents, carry):
    carry = dataclasses.replace(
      carry,
      previous=tokens,
      number=carry.number + 1,
      memory=of_parents(carry.memory, tokens, parents),
    )
    return self._of_slot(params, carry)

  def _of_slot(self, params, carry):
    found = of_step(carry.found, carry.number, carry.previous)
    logits, memory = self.given(params, found, carry.previous, carry.memory)
    return logits, dataclasses.replace(carry, memory=memory)

  def end(self, carry, state):
    del state
    return carry.state


def check_branches(drafter: Any) -> None:
  """Raises ValueError unless the drafter can draft trees."""
  if not isinstance(drafter, Steps):
    raise ValueError(
      'a tree continues several drafts at once, which '
      f'{type(drafter).__name__} cannot do: make the tree with Assistant, '
      'Chain, DFlash, DFlash2, DraftModel, DSpark, Eagle, Eagle3, Hydra, MTP, '
      'Medusa, PARD, PEagle, Skip or TLI'
    )


def check_siblings(count: int, logits: Array) -> None:
  """Raises ValueError unless logits [..., V'] have at least `count` tokens."""
  if count > logits.shape[-1]:
    raise ValueError(
      f'the tree has {count} siblings, but the drafter drafts only '
      f'{logits.shape[-1]} different tokens: make the tree narrower, or use a '
      'drafter with a larger draft_vocab_size'
    )


def pending(tokens: Array, length: Array) -> Array:
  """Returns the last of the first length [B] of tokens [B, S]: [B, 1]."""
  return indexing.at(tokens, length[:, None] - 1)


def of_parents(values: Any, tokens: Array, parents: Array | None) -> Any:
  """Returns values [B, n, ...] of the parents of new tokens [B, n].

  Args:
    values: a tree of arrays [B, m, ...], of the latest m nodes, which are the
      only ones with new children.
    tokens, parents: as `Steps.next` takes them; a chain's one node is the
      parent.
  """
  if parents is None:
    return values
  num_new = tokens.shape[1]
  num_before = 1 + parents.shape[1] - num_new

  def of_latest(x):
    index = parents[:, -num_new:] - (num_before - x.shape[1])
    return indexing.at(x, index)

  return jax.tree.map(of_latest, values)


def of_step(values: Any, number: Array | int, tokens: Array) -> Any:
  """Returns what step `number` of a drafter has for tokens [B, n].

  A drafter that computes all K steps at once has the same for all tokens.

  Args:
    values: a tree of arrays [B, K, ...]; those returned are [B, n, ...].
    number: [] int32, from 0.
    tokens: the tokens before the step.
  """

  def of_one(x):
    found = jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1)
    return jnp.broadcast_to(found, (*tokens.shape, *x.shape[2:]))

  return jax.tree.map(of_one, values)


def _draft(drafted, found):
  """Returns a batch of chains, given probs and signals [K, B, ...]."""
  probs, signals = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
  return Draft(
    tokens=drafted, probs=probs, kind=DraftKind.SAMPLED, signals=signals
  )


def _taken(drafted, i):
  """Returns draft token i of each row, [B, 1], 0 in rows without one."""
  token = jax.lax.dynamic_slice_in_dim(drafted, i, 1, axis=1)
  return jnp.maximum(token, 0)
