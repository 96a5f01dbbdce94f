"""Drafters do what they declare, and the old contract is refused."""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import verify
from specsample.drafter import Drafter
from specsample.drafters import steps
from specsample.drafters import wrapper
from specsample.loop.decoder import Decoder

_MODEL = testing.HashModel(vocab_size=12)
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


def _prefill(drafter, rule):
  return specsample.prefill(
    Decoder(_MODEL, drafter, rule),
    {'target': {}, 'drafter': {}},
    jnp.asarray([[3, 1, 3]]),
    jnp.asarray([3]),
    jax.random.key(0),
    sampling=specsample.Sampling(temperature=0.0),
    max_new_tokens=8,
  )


@pytest.mark.parametrize(
  ('drafter', 'depth', 'count', 'rule', 'message'),
  [
    (_TREE, 2, 6, verify.tree, r'declares depth 2, but Draft.depth is 3: '),
    (_CHAIN, 1, 2, verify.chain, r'declares depth 1, but Draft.depth is 2: '),
    (
      _CHAIN,
      3,
      3,
      verify.chain,
      r'declares num_draft_tokens 3, but its draft ',
    ),
  ],
)
def test_a_draft_of_another_size_is_refused(
  drafter, depth, count, rule, message
):
  says = _Says(drafter=drafter, depth=depth, num_draft_tokens=count)
  with pytest.raises(ValueError, match=message):
    _prefill(says, rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Proposes(drafters.Ngram):
  change: Callable

  def propose(self, *arguments):
    return self.change(*super().propose(*arguments))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda draft, state: draft, r'propose returned Draft: return a pair'),
    (lambda draft, state: (state, draft), r'propose returned tuple: return a'),
    (
      lambda draft, state: (
        dataclasses.replace(draft, tokens=draft.tokens.astype(jnp.float32)),
        state,
      ),
      'drafts tokens of dtype float32: return int32',
    ),
  ],
)
def test_what_is_no_draft_is_refused(change, message):
  drafter = _Proposes(num_draft_tokens=2, change=change)
  with pytest.raises(TypeError, match=f'_Proposes.*{message}'):
    _prefill(drafter, verify.chain)


def test_a_drafter_that_cannot_be_hashed_is_refused():
  class Thawed(drafters.Ngram):
    __hash__ = None

  with pytest.raises(ValueError, match=r'Thawed, .* unhashable .* a frozen'):
    _prefill(Thawed(num_draft_tokens=2), verify.chain)


def test_steps_without_a_first_cannot_be_made():
  class Without(steps.Steps):
    num_draft_tokens = 2

    def next(self, params, tokens, parents, carry):
      """See `steps.Steps`."""

  with pytest.raises(TypeError, match=r'abstract class Without.* first'):
    Without()


class _Alien:
  """A drafter that is not derived from `Drafter`."""

  num_draft_tokens = 2

  def propose(self):
    """Drafts."""


@pytest.mark.parametrize(
  ('drafter', 'message'),
  [
    (_Alien(), '_Alien .*: give a drafter that derives from'),
    (drafters.Chain, 'drafter is the class Chain: give an instance'),
    (None, 'drafter is None: give a drafter'),
  ],
)
def test_what_is_no_drafter_is_refused(drafter, message):
  with pytest.raises(ValueError, match=message):
    _prefill(drafter, verify.chain)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: drafters.Ngram(num_draft_tokens=2, max_ngram=100_000),
      'max_ngram is 100000: give an integer from 1 to 64',
    ),
    (
      lambda: drafters.Ngram(num_draft_tokens=2, max_ngram='a'),
      "max_ngram is 'a': give an integer",
    ),
    (
      lambda: drafters.Chain(model=testing.HashModel, num_draft_tokens=2),
      'model is the class HashModel: give a model',
    ),
    (
      lambda: drafters.Skip(model=None, layers=(0,), num_draft_tokens=2),
      'model is None: give a model',
    ),
    (
      lambda: drafters.Skip(model=_MODEL, layers=1, num_draft_tokens=2),
      'layers are 1, but the target has layers 0 to 3',
    ),
    (
      lambda: drafters.Medusa(model=None, num_draft_tokens=2),
      'model is None: give a model',
    ),
    (
      lambda: drafters.Adaptive(drafter=_CHAIN, policies=(policies.Fixed,)),
      r'policies is \(<class .*: give a tuple of policies',
    ),
    (
      lambda: drafters.Adaptive(drafter=_CHAIN, policies=policies.Fixed(1)),
      r'policies is Fixed\(.*: give a tuple of policies',
    ),
    (
      lambda: drafters.Tree(drafter=_CHAIN, topology=(0, 0, 1)),
      'topology is of type tuple: give one of specsample.tree',
    ),
  ],
)
def test_what_a_drafter_cannot_be_made_of_is_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_draft_ends_where_nothing_is_offered():
  likeliest = lambda probs, position, node=None: jnp.argmax(probs, axis=-1)
  softmax = lambda logits, drafted: jax.nn.softmax(logits)
  tokens, length = jnp.asarray([[6, 9], [11, 9], [-1, 9]]), jnp.full(3, 2)
  propose = lambda drafter: drafter.propose(
    {}, likeliest, softmax, tokens, length, ()
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


def test_it_stops_once_no_row_goes_on():
  calls = []

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Counts(_Halves):
    def next(self, params, tokens, parents, carry):
      jax.debug.callback(lambda: calls.append(1))
      return super().next(params, tokens, parents, carry)

  def goes_on(draft):
    drafted = draft.tokens >= 0
    return drafted, drafted & (jnp.arange(3) < 1)

  likeliest = lambda probs, position, node=None: jnp.argmax(probs, axis=-1)
  found, _ = Counts().propose_while(
    {},
    likeliest,
    lambda logits, drafted: jax.nn.softmax(logits),
    jnp.asarray([[6, 9]]),
    jnp.full(1, 2),
    (),
    goes_on=goes_on,
  )
  jax.effects_barrier()
  assert found.tokens.tolist() == [[7, 8, -1]]
  assert len(calls) == 1
