"""Drafters do what they declare, and the old contract is refused."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import specsample
from specsample import drafters
from specsample import testing
from specsample import verify
from specsample.drafter import Drafter
from specsample.drafters import steps
from specsample.drafters import wrapper
from specsample.loop.decoder import Decoder
from tests.drafters import rounds

_MODEL = testing.HashModel(vocab_size=rounds.V)
_CHAIN = drafters.Chain(model=_MODEL, num_draft_tokens=2)
_TREE = drafters.NgramTree(num_branches=2, depth=3, min_ngram=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Says(wrapper.Wrapper):
  """A drafter that declares other sizes than those of its drafts."""

  drafter: Drafter
  depth: int
  num_draft_tokens: int

  def propose(self, params, draw, warp, tokens, length, state):
    return self.drafter.propose(params, draw, warp, tokens, length, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Halves(steps.Steps):
  """Drafts tokens below 8, then any; after token 0 it has nothing to offer."""

  num_draft_tokens: int = 3

  def first(self, params, tokens, length, state):
    del params, length, state
    return self._logits(tokens[:, :1], 8), ()

  def next(self, params, tokens, parents, carry):
    del params, parents
    logits = self._logits(tokens, 12)
    return jnp.where(tokens[..., None] == 0, -jnp.inf, logits), carry

  def _logits(self, tokens, size):
    """Returns logits [B, n, 12] that prefer the token after each."""
    ids = jnp.arange(12)
    logits = -jnp.abs(ids - tokens[..., None] - 1.0)
    return jnp.where(ids < size, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Proposes(drafters.Ngram):
  """A drafter whose draft is changed."""

  num_draft_tokens: int = 2
  change: Callable

  def propose(self, *arguments):
    return self.change(*super().propose(*arguments))


class _Thawed(drafters.Ngram):
  __hash__ = None


class _Alien:
  """A drafter that is not derived from `Drafter`."""

  num_draft_tokens = 2

  def propose(self):
    """Drafts."""


def _in_floats(draft, state):
  tokens = draft.tokens.astype(jnp.float32)
  return dataclasses.replace(draft, tokens=tokens), state


@pytest.mark.parametrize(
  ('drafter', 'rule', 'message'),
  [
    (
      _Says(drafter=_TREE, depth=2, num_draft_tokens=6),
      verify.tree,
      'declares depth 2, but Draft.depth is 3: ',
    ),
    (
      _Says(drafter=_CHAIN, depth=1, num_draft_tokens=2),
      verify.chain,
      'declares depth 1, but Draft.depth is 2: ',
    ),
    (
      _Says(drafter=_CHAIN, depth=3, num_draft_tokens=3),
      verify.chain,
      'declares num_draft_tokens 3, but its draft ',
    ),
    (
      _Proposes(change=lambda draft, state: draft),
      verify.chain,
      r'_Proposes.*propose returned Draft: return a pair',
    ),
    (
      _Proposes(change=lambda draft, state: (state, draft)),
      verify.chain,
      r'_Proposes.*propose returned tuple: return a',
    ),
    (
      _Proposes(change=_in_floats),
      verify.chain,
      '_Proposes.*drafts tokens of dtype float32: return int32',
    ),
    (
      _Thawed(num_draft_tokens=2),
      verify.chain,
      r'Thawed, .* unhashable .* a frozen',
    ),
    (_Alien(), verify.chain, '_Alien .*: give a drafter that derives from'),
    (
      drafters.Chain,
      verify.chain,
      'drafter is the class Chain: give an instance',
    ),
    (None, verify.chain, 'drafter is None: give a drafter'),
  ],
)
def test_what_is_no_drafter_is_refused(drafter, rule, message):
  error = TypeError if isinstance(drafter, _Proposes) else ValueError
  with pytest.raises(error, match=message):
    specsample.prefill(
      Decoder(_MODEL, drafter, rule),
      {'target': {}, 'drafter': {}},
      jnp.asarray([[3, 1, 3]]),
      jnp.asarray([3]),
      jax.random.key(0),
      sampling=specsample.Sampling(temperature=0.0),
      max_new_tokens=8,
    )


def test_steps_without_a_first_cannot_be_made():
  class Without(steps.Steps):
    num_draft_tokens = 2

    def next(self, params, tokens, parents, carry):
      """See `steps.Steps`."""

  with pytest.raises(TypeError, match=r'abstract class Without.* first'):
    Without()


@pytest.mark.slow
def test_draft_ends_where_nothing_is_offered():
  tokens, length = jnp.asarray([[6, 9], [11, 9], [-1, 9]]), jnp.full(3, 2)
  propose = lambda drafter: drafter.propose(
    {}, rounds.best, rounds.softmax, tokens, length, ()
  )[0]
  found = propose(_Halves())
  # 7 is the largest first token; after 0 there is none.
  assert found.tokens.tolist() == [[7, 8, 9], [7, 8, 9], [0, -1, -1]]
  assert (found.probs.sum(axis=-1) > 0.5).tolist() == [
    [True] * 3,
    [True] * 3,
    [True, False, False],
  ]
  greedy = drafters.Tree(
    drafter=_Halves(), topology=specsample.tree.Topology((0, 1, 2))
  )
  assert propose(greedy).tokens.tolist() == found.tokens.tolist()


def test_drafter_stops_once_no_row_goes_on():
  calls = []

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Counts(_Halves):
    def next(self, params, tokens, parents, carry):
      jax.debug.callback(lambda: calls.append(1))
      return super().next(params, tokens, parents, carry)

  def goes_on(draft):
    drafted = draft.tokens >= 0
    return drafted, drafted & (jnp.arange(3) < 1)

  tokens, length = rounds.rows([[6, 9]])
  found, _ = Counts().propose_while(
    {}, rounds.best, rounds.softmax, tokens, length, (), goes_on=goes_on
  )
  jax.effects_barrier()
  assert found.tokens.tolist() == [[7, 8, -1]]
  assert len(calls) == 1
