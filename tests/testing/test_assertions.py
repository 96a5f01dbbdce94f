"""The shipped assertions pass what is right and find what is broken."""

from collections.abc import Callable
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.certificate.planted import drafters as planted
from experiments.certificate.planted import loop
from experiments.certificate.planted import rules
from specsample import drafters
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import assertions
from specsample.testing import cases as cases_lib
from specsample.types import DraftKind

_MODEL = testing.HashModel(vocab_size=16)
_CHAIN = drafters.Chain(
  model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=3
)
_PARAMS = {'target': {}, 'drafter': {}}
_PROMPTS = np.arange(4 * 6).reshape(4, 6) % 16
_LENGTHS = np.asarray([6, 2, 5, 1])


def _run(assertion, *arguments, **changes):
  settings = {
    'model': _MODEL,
    'drafter': _CHAIN,
    'verify': verify.block,
    'max_new_tokens': 16,
  }
  assertion(_PARAMS, _PROMPTS, _LENGTHS, *arguments, **(settings | changes))


_SAMPLED, _WITHOUT = DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT


def _tree(kind):
  """Returns a drafter of two children with one child each."""
  return drafters.Tree(
    drafter=dataclasses.replace(_CHAIN, num_draft_tokens=2),
    topology=tree.k_ary((2, 1)),
    kind=kind,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Changed(planted.Wrapper):
  field: str
  value: Callable  # a function of the draft

  def propose(self, params, draw, warp, tokens, length, state):
    draft, state = super().propose(params, draw, warp, tokens, length, state)
    changed = {self.field: self.value(draft)}
    return dataclasses.replace(draft, **changed), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shifted(planted.Wrapper):
  """Drafts other tokens, by something that is not a row's text."""

  by: Callable  # of the tokens [B, S] and the lengths [B]

  def propose(self, params, draw, warp, tokens, length, state):
    draft, state = super().propose(params, draw, warp, tokens, length, state)
    moved = (draft.tokens + self.by(tokens, length)) % _MODEL.vocab_size
    point_mass = DraftKind.POINT_MASS
    draft = dataclasses.replace(
      draft, tokens=moved.astype(jnp.int32), probs=None, kind=point_mass
    )
    return draft, state


def _assert_draft(drafter):
  testing.assert_draft(
    _PARAMS,
    _PROMPTS,
    _LENGTHS,
    jax.random.key(0),
    model=_MODEL,
    drafter=drafter,
    verify=verify.tree,
    sampling=Sampling(temperature=1.0, top_k=4),
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter',
  [
    _CHAIN,
    *map(_tree, DraftKind),
    drafters.DynamicTree(drafter=_CHAIN, num_draft_tokens=6, width=3),
    drafters.NgramTree(num_branches=2, depth=2, min_ngram=1),
  ],
  ids=lambda drafter: type(drafter).__name__,
)
def test_a_draft_of_its_kind_passes(drafter):
  _assert_draft(drafter)


def _parents(*parents):
  return lambda draft: jnp.tile(jnp.asarray(parents), (4, 1))


def _second_as_the_first(x):
  return x.at[:, 1].set(x[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'field', 'value', 'message'),
  [
    (
      DraftKind.POINT_MASS,
      'parents',
      _parents(0, 0, 4, 2),
      r'row 0: node 3 has the parent 4, which must be one of 0 to 2: list',
    ),
    (
      DraftKind.POINT_MASS,
      'tokens',
      lambda draft: _second_as_the_first(draft.tokens),
      r'row 0: nodes 1 and 2 \(children of node 0\) are both token \d+, '
      r".* 'point_mass'",
    ),
    (
      _WITHOUT,
      'tokens',
      lambda draft: _second_as_the_first(draft.tokens),
      r'nodes 1 and 2 \(children of node 0\) are both '
      r".* 'without_replacement' must be distinct",
    ),
    (
      _WITHOUT,
      'probs',
      lambda draft: jnp.full_like(draft.probs, 0.25),
      r'the second node gives the token of the first, .* 0\.25: exclude',
    ),
    (
      _WITHOUT,
      'kind',
      lambda draft: _SAMPLED,
      r'nodes 1 and 2 \(children of node 0\) are drawn from different dis',
    ),
    (
      _SAMPLED,
      'probs',
      lambda draft: jnp.zeros_like(draft.probs),
      r'node 1 is token \d+, to which its row of Draft\.probs gives 0: it',
    ),
    (
      _SAMPLED,
      'depth',
      lambda draft: 1,
      r'node 3 is at depth 2, but Draft\.depth is 1',
    ),
    (
      _SAMPLED,
      'num_children',
      lambda draft: (1, 1, 1, 0, 0),
      r'node 2 has 1 siblings before it, .* is 1 for node 0: it is never',
    ),
  ],
)
def test_a_draft_that_is_not_of_its_kind_is_found(kind, field, value, message):
  with pytest.raises(AssertionError, match=message):
    _assert_draft(_Changed(drafter=_tree(kind), field=field, value=value))


class _Hasty(type(verify.chain)):
  """The token rule by its law; what it draws keeps the first draft always."""

  def __call__(self, key, draft, target_probs):
    verdict = super().__call__(key, draft, target_probs)
    kept = jnp.maximum(verdict.num_accepted, draft.tokens[0] >= 0)
    return dataclasses.replace(verdict, num_accepted=kept)


@pytest.mark.slow
def test_exact():
  few = list(itertools.islice(cases_lib.rule_cases(), 8))
  testing.assert_exact(verify.block, few)
  testing.assert_exact(verify.coupled, few)  # only its point masses
  with pytest.raises(AssertionError, match=r'plain, sampled, V = 2, K = 1'):
    testing.assert_exact(rules.Rule(law=rules.plain_residual), few)
  with pytest.raises(AssertionError, match='does not draw from its own law'):
    testing.assert_exact(_Hasty(), few)
  sampled = [case for case in few if case.kind is DraftKind.SAMPLED]
  for rule, cases in ((verify.block, []), (verify.coupled, sampled)):
    with pytest.raises(AssertionError, match='nothing was enumerated'):
      testing.assert_exact(rule, cases)


def test_a_long_check_says_how_far_it_is(monkeypatch, capsys):
  few = list(itertools.islice(cases_lib.rule_cases(), 3))
  monkeypatch.setattr(assertions, '_SECONDS', 0)
  testing.assert_exact(verify.chain, few)
  assert capsys.readouterr().err.splitlines() == [
    f'{done}: {i} of 3 cases'
    for done in ('laws enumerated', 'verdicts drawn')
    for i in (1, 2)
  ]


@pytest.mark.slow
def test_a_drafter():
  model = testing.HashModel(vocab_size=3)
  chain = drafters.Chain(
    model=dataclasses.replace(model, noise=0.5), num_draft_tokens=2
  )
  check = functools.partial(
    testing.assert_drafter, _PARAMS, jax.random.key(0), model=model
  )
  check(drafter=chain, verify=verify.block)
  # The kind, and what the draws came from, fit; the declared law does not.
  misdeclared = planted.Misdeclared(drafter=chain, drawn=planted.raw)
  with pytest.raises(
    AssertionError,
    match=r'^Misdeclared.*If `assert_exact\(Block\(\)\)` passes, the drafter '
    r'is at fault: a draft token was not drawn from its row',
  ):
    check(drafter=misdeclared, verify=verify.block)


def test_a_drafter_with_a_softmax_of_its_own_is_told_so():
  model = testing.HashModel(vocab_size=3)
  rounded = planted.Misdeclared(
    drafter=drafters.Chain(
      model=dataclasses.replace(model, noise=0.5), num_draft_tokens=1
    ),
    declared=lambda warp: lambda *args: warp(*args) * (1 + 2**-22),
  )
  with pytest.raises(AssertionError, match=r'is \d\.\de-07\. If .* very array'):
    testing.assert_drafter(
      *(_PARAMS, jax.random.key(0)),
      model=model,
      drafter=rounded,
      verify=verify.chain,
    )


@pytest.mark.slow
def test_rows_that_emit_nothing_show_nothing():
  model = testing.HashModel(vocab_size=16, scale=float('nan'))
  for assertion, *arguments in (
    (testing.assert_greedy_equal,),
    (testing.assert_batch_invariant, jax.random.key(2)),
  ):
    changes = {'sampling': Sampling()} if arguments else {}
    with pytest.raises(AssertionError, match='rows that all emit at least one'):
      _run(assertion, *arguments, model=model, **changes)


@pytest.mark.slow
def test_follows_target():
  model = testing.HashModel(vocab_size=3)
  chain = drafters.Chain(
    model=dataclasses.replace(model, noise=0.5), num_draft_tokens=2
  )
  groups = (testing.Group((1, 2), Sampling(temperature=1.0)),)
  run = lambda rule: testing.assert_follows_target(
    _PARAMS,
    groups,
    jax.random.key(0),
    model=model,
    drafter=chain,
    verify=rule,
    num_rows=16384,
  )
  run(verify.block)
  with pytest.raises(AssertionError, match='does not follow the target'):
    run(rules.Rule(law=rules.plain_residual))


@pytest.mark.slow
def test_greedy_equal():
  _run(testing.assert_greedy_equal)
  with pytest.raises(AssertionError, match='of 64 tokens'):
    _run(testing.assert_greedy_equal, verify=verify.Synthetic(rate=0.5))


@pytest.mark.slow
def test_equals_plain_sampling():
  run = lambda rule: _run(
    testing.assert_equals_plain_sampling,
    jax.random.key(2),
    verify=rule,
    sampling=Sampling(temperature=1.0),
  )
  run(verify.coupled)
  # The rule is exact, but uses other random numbers.
  with pytest.raises(AssertionError, match='differ from plain sampling'):
    run(verify.chain)


@pytest.mark.slow
def test_batch_invariant():
  mixed = Sampling(temperature=np.asarray([1.0, 0.0, 0.5, 1.5]))
  run = lambda **changes: _run(
    testing.assert_batch_invariant,
    jax.random.key(2),
    sampling=mixed,
    **changes,
  )
  run()
  with pytest.raises(AssertionError, match=r'tokens of rows \[\d\] .* alone'):
    run(model=loop.OneLength(vocab_size=16))
  for shift, words in (
    (lambda tokens, length: tokens.shape[1] // 128, 'in longer buffers'),
    (
      lambda tokens, length: jnp.take_along_axis(
        tokens, length[:, None], axis=1, mode='clip'
      ),
      'with other tokens behind their text',
    ),
  ):
    with pytest.raises(AssertionError, match=f'tokens of rows .* {words}'):
      run(drafter=_Shifted(drafter=_CHAIN, by=shift))
