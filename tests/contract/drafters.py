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

from specsample import drafters
from specsample import policies
from specsample import testing
from specsample import tree
from specsample import verify
from specsample.drafter import Drafter
from specsample.testing import trained
from specsample.types import Model, Params, Verifier

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
