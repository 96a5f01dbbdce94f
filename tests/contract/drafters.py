"""The drafters that `test_drafters.py` tests, each with a target and a rule.

A trained drafter comes from `testing.trained.CASES`. Another one is a line in
`OTHERS`.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specsample
from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafter import Drafter
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.policies import policy as policy_lib
from specsample.sampling import Sampling
from specsample.testing import trained
from specsample.types import Draft, Model, Params, Verifier

V, K = 12, 3
# The tokens that can be drafted by drafters with a vocabulary of their own.
D2T = np.asarray([6, 1, 11, 4, 3, 0, 9])
_HASHES = testing.HashModel(vocab_size=V)
_GUESSES = testing.HashModel(vocab_size=V, noise_seed=2, noise=0.5)
_CHAIN = drafters.Chain(model=_GUESSES, num_draft_tokens=K)
_SMALL_CHAIN = drafters.Chain(
  model=testing.HashModel(vocab_size=3, noise_seed=2, noise=0.5),
  num_draft_tokens=2,
)
_PARD = drafters.PARD(model=_GUESSES, num_draft_tokens=K, mask_token_id=9)
_TREE = tree.Topology((0, 0, 1, 0, 1, 2, 5, 3, 5))


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
  """A drafter, the target that it drafts for, and the rule for its drafts."""

  model: Model
  drafter: Drafter
  params: Params
  verify: Verifier = verify.block

  @property
  def parts(self) -> dict[str, Any]:
    """The arguments of `generate` that the assertions take too."""
    return {
      'model': self.model,
      'drafter': self.drafter,
      'verify': self.verify,
    }


KINDS = {kind.name: kind for kind in trained.CASES}


def target(dtype: str = 'float32') -> Any:
  """Returns a Llama of two layers."""
  llama = testing.tiny_llama(vocab_size=V)
  return dataclasses.replace(llama, dtype=dtype)


@functools.cache
def of_kind(
  name: str, dtype: str = 'float32', draft_vocab_size: int | None = D2T.size
) -> Subject:
  """Returns a trained drafter; noise stands in for training."""
  model = target(dtype)
  drafter = KINDS[name].make(model, K, draft_vocab_size)
  # Larger than at initialisation, where one layer hardly matters.
  of_target = jax.tree.map(lambda x: 1.6 * x, target().init(jax.random.key(0)))
  d2t = None if drafter.draft_vocab_size is None else D2T
  own = KINDS[name].make(target(), K, draft_vocab_size)
  own = own.init_params(jax.random.key(1), of_target, d2t)
  own = trained.with_noise(own, jax.random.key(2))
  cast = lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x
  params = jax.tree.map(cast, {'target': of_target, 'drafter': own})
  return Subject(model, drafter, params)


def _of_tables(drafter: Drafter, rule: Verifier = verify.block) -> Subject:
  return Subject(_HASHES, drafter, {'target': {}, 'drafter': {}}, rule)


def _of_scene(scene: trained.Trained) -> Subject:
  return Subject(scene.model, scene.drafter, scene.params)


def _with_room() -> Subject:
  scene = trained.other_vocabulary()
  drafter = dataclasses.replace(scene.drafter, room=2.0, spare=64)
  return Subject(scene.model, drafter, scene.params)


def _in_trees(name: str, make: Callable[[Any], Drafter]) -> Subject:
  chain = of_kind(name)
  return dataclasses.replace(
    chain, drafter=make(chain.drafter), verify=verify.tree
  )


OTHERS: dict[str, Callable[[], Subject]] = {
  'Chain': lambda: _of_tables(_CHAIN),
  'Skip': lambda: dataclasses.replace(
    of_kind('EAGLE'),
    drafter=drafters.Skip(model=target(), layers=(0,), num_draft_tokens=K),
  ),
  'Ngram': lambda: _of_tables(
    drafters.Ngram(num_draft_tokens=K, min_ngram=1), verify.chain
  ),
  'NgramTree': lambda: _of_tables(
    drafters.NgramTree(num_branches=2, depth=2, min_ngram=1), verify.tree
  ),
  'Suffix': lambda: _of_scene(trained.remembering()),
  'Either': lambda: _of_scene(trained.either(_SMALL_CHAIN)),
  'TLI': lambda: _of_scene(trained.other_vocabulary()),
  'TLI with room': _with_room,
  'PARD': lambda: _of_tables(_PARD),
  'Adaptive': lambda: _of_tables(
    drafters.Adaptive(
      drafter=_CHAIN,
      policies=(policies.Fastest(costs=(1, 1.1, 1.2, 1.3)),),
      widths=(0, 1),
    )
  ),
  'Tree': lambda: _of_tables(
    drafters.Tree(drafter=_CHAIN, topology=_TREE), verify.tree
  ),
  'Tree, traversal': lambda: _of_tables(
    drafters.Tree(drafter=_CHAIN, topology=_TREE), verify.traversal
  ),
  'Tree of PARD': lambda: _of_tables(
    drafters.Tree(drafter=_PARD, topology=_TREE), verify.tree
  ),
  'DynamicTree of EAGLE-3': lambda: _in_trees(
    'EAGLE-3',
    lambda chain: drafters.DynamicTree(
      drafter=chain, num_draft_tokens=6, width=3
    ),
  ),
  'LatticeTree of DFlash 2': lambda: _in_trees(
    'DFlash 2',
    lambda chain: drafters.LatticeTree(
      drafter=chain, num_draft_tokens=6, candidates=2
    ),
  ),
  'LatticeTree of DSpark': lambda: _in_trees(
    'DSpark',
    lambda chain: drafters.LatticeTree(
      drafter=chain, num_draft_tokens=6, candidates=4
    ),
  ),
  **{
    f'Tree of {name}': functools.partial(
      _in_trees,
      name,
      lambda chain: drafters.Tree(drafter=chain, topology=_TREE),
    )
    for name, kind in KINDS.items()
    if kind.branches
  },
}
NAMES = (*KINDS, *OTHERS)


@functools.cache
def subject(name: str) -> Subject:
  """Returns the subject of that name."""
  return of_kind(name) if name in KINDS else OTHERS[name]()


@dataclasses.dataclass(frozen=True)
class _Seldom(policy_lib.Policy):
  """A policy that drafts in every fourth round."""

  def init(self, num_draft_tokens):
    del num_draft_tokens
    return jnp.int32(0)

  def length(self, state, over):
    del over
    return jnp.where(state % 4 == 3, 99, 0)

  def update(self, drafted, kept, state, over):
    del drafted, kept, over
    return state + 1


def _used(one, way):
  """Returns a drafter that uses a subject's, its parameters, and the used one.

  The last value is a function that returns the used one's state.
  """
  if way == 'always':
    return one.drafter, one.params, one.drafter, lambda state: state
  if way == 'seldom':
    user = drafters.Adaptive(drafter=one.drafter, policies=(_Seldom(),))
    return user, one.params, one.drafter, lambda state: state.inner
  remembered = drafters.Suffix(num_draft_tokens=5, min_kept=0.2)
  user = drafters.Either(remembered=remembered, trained=one.drafter)
  own = {'trained': one.params['drafter']} if 'drafter' in one.params else {}
  params = one.params | {'drafter': own}
  return user, params, user.trained.drafter, lambda state: state.trained.inner


def next_drafts(
  one: Subject, way: str = 'always', anew: Drafter | None = None
) -> tuple[Draft, Draft, np.ndarray]:
  """Returns the draft after some rounds, and that of one that begins anew.

  Also returns how many rounds kept 0, 1, ... drafts.

  Args:
    one: the drafter.
    way: 'always' if it drafts in every round, 'seldom' if in every fourth, or
      'beside' for one of the two drafters of an `Either`.
    anew: the drafter that is given the whole text at once, by default the same.
  """
  user, params, drafter, used = _used(one, way)
  anew = drafter if anew is None else anew
  # Prefills read 64 tokens at a time.
  prompts = np.random.default_rng(0).integers(
    one.model.vocab_size, size=(5, 70)
  )
  # This rule keeps many drafts of an untrained drafter, some of them in part.
  rule = verify.Typical(epsilon=0.05, delta=0.5)
  prefill = lambda drafter, params, prompts, lengths: specsample.prefill(
    Decoder(one.model, drafter, rule),
    params,
    prompts,
    lengths,
    jax.random.key(0),
    sampling=Sampling(temperature=1.0),
    max_new_tokens=100,
    max_length=192,
  )
  state = prefill(user, params, prompts, np.asarray([70, 64, 65, 2, 1]))
  state = specsample.advance(
    Decoder(one.model, user, rule),
    params,
    state,
    max_rounds=15 if way == 'seldom' else 6,
  )
  assert not np.any(state.done)

  @functools.partial(jax.jit, static_argnames='drafter')
  def propose(params, state, inner, *, drafter):
    inner = drafter.resume(params, state.tokens, state.length, inner)
    state = dataclasses.replace(state, draft=inner)
    return step.propose(Decoder(one.model, drafter, rule), params, state)[0]

  fresh = prefill(anew, one.params, state.tokens, np.asarray(state.length))
  found = propose(one.params, state, used(state.draft), drafter=drafter)
  expected = propose(one.params, state, fresh.draft, drafter=anew)
  return found, expected, np.asarray(state.accepted).sum(axis=0)
