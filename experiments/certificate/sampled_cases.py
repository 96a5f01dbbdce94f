"""The combinations for which the compiled loop is compared with exact laws."""

from collections.abc import Callable, Iterator
import dataclasses
import functools

import jax
import numpy as np

from specsample import drafters
from specsample import policies
from specsample import tree
from specsample import verify
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import adapting
from specsample.testing import cases
from specsample.testing import grammar
from specsample.testing import neighbours
from specsample.testing import sample as sample_lib
from specsample.testing import tiny
from specsample.testing import trained
from specsample.testing import tree_acceptance
from specsample.testing.conditional import Conditional
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Proposal
from specsample.testing.sample import Group
from specsample.types import Drafter, DraftKind, Model, Params, Verifier

VERIFIERS: dict[str, Verifier] = {
  'chain': verify.chain,
  'block': verify.block,
  'coupled': verify.coupled,
}
# The rules for trees, and the kinds of siblings that the loop is sampled with.
TREE_VERIFIERS: dict[str, Verifier] = {
  'tree': verify.tree,
  'traversal': verify.traversal,
  'k_seq': verify.k_seq,
  'greedy_draft': verify.greedy_draft,
  'multi_path_block': verify.multi_path_block,
}
# The expected number of kept drafts, by formulas that do not use the rules.
KEPT: dict[str, Callable[[Proposal, Conditional], np.ndarray]] = {
  'chain': acceptance.chain,
  'block': acceptance.block,
  # `coupled.law` takes only point masses, for which it is the token rule.
  'coupled': acceptance.chain,
  'tree': tree_acceptance.tree,
  'traversal': tree_acceptance.traversal,
  'k_seq': tree_acceptance.k_seq,
  'greedy_draft': tree_acceptance.greedy_draft,
  'multi_path_block': tree_acceptance.multi_path_block,
}
_TREE_DRAWS = (
  ('tree', DraftKind.POINT_MASS),
  ('tree', DraftKind.SAMPLED),
  ('traversal', DraftKind.WITHOUT_REPLACEMENT),
  ('k_seq', DraftKind.SAMPLED),
  ('greedy_draft', DraftKind.TOP_AND_SAMPLED),
  ('multi_path_block', DraftKind.SAMPLED),
)
_TREE = tree.Topology((0, 0, 1))
NUM_TOKENS = 4  # with K = 2, at least two rounds
_EOS_ID = 2

_MODEL = HashModel(vocab_size=3)
_PROMPTS = ((1, 0, 1), (2, 2, 0, 1, 2))
_MIXED = tuple(
  Group(prompt, sampling)
  for prompt in _PROMPTS
  for sampling in (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=2),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.0),
  )
)
# One group per prompt, for drafters whose predictions take long to compile.
_TWO = (_MIXED[0], _MIXED[6])
# Strong enough to show if nodes off a tree's path are counted.
_PENALISED = tuple(
  Group(prompt, sampling)
  for prompt in _PROMPTS
  for sampling in (
    Sampling(temperature=1.0, repetition_penalty=1.5, frequency_penalty=2.0),
    Sampling(temperature=1.0, presence_penalty=2.0, frequency_penalty=-1.0),
  )
)


# Rows that start in different states, as with a grammar for each.
_CONSTRAINED = tuple(
  Group(prompt, cases.constrained_by(grammar.OneForbidden(3), start))
  for start, prompt in enumerate(_PROMPTS)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
  """One combination that is sampled."""

  drafter_name: str
  drafter: Drafter
  verifier_name: str
  kind: DraftKind
  settings: str
  groups: tuple[Group, ...]
  model: Model = _MODEL
  params: Params = dataclasses.field(
    default_factory=lambda: {'target': {}, 'drafter': {}}
  )
  # The model that the drafter samples from and its parameters, if it has one.
  drafts_from: Callable[[], tuple[Model, Params]] | None = None
  eos_id: int | None = None
  # Whether drafts have the same shape in all rows. Only then is the number of
  # kept drafts predicted.
  is_of_one_shape: bool = True
  sample: Callable[..., sample_lib.Sample] = sample_lib.draw

  @property
  def name(self) -> str:
    """A description of what is sampled."""
    return f'{self.drafter_name} + {self.verifier_name}, {self.settings}'


def draws() -> Iterator[Draw]:
  """Yields every drafter with rules for its drafts, and a worst case."""
  for name in VERIFIERS:
    mixed = functools.partial(
      Draw, verifier_name=name, settings='mixed batch', groups=_MIXED
    )
    yield mixed(
      drafter_name='NoDraft',
      drafter=drafters.NoDraft(),
      kind=DraftKind.POINT_MASS,
    )
    yield mixed(
      drafter_name='Ngram',
      drafter=drafters.Ngram(num_draft_tokens=2, min_ngram=1),
      kind=DraftKind.POINT_MASS,
    )
    yield _chain(mixed, 'Chain', noise=0.5)
    yield mixed(
      drafter_name='PARD',
      drafter=drafters.PARD(
        model=dataclasses.replace(_MODEL, noise=0.5),
        num_draft_tokens=2,
        mask_token_id=2,
      ),
      kind=DraftKind.SAMPLED,
    )
    yield _skip(mixed, 'Skip', _MODEL, {})
    yield _chain(
      functools.partial(
        mixed,
        settings='penalties, an EOS',
        groups=_PENALISED,
        eos_id=_EOS_ID,
      ),
      'Chain',
      noise=0.5,
    )
    yield _chain(mixed, 'Chain of the least likely tokens', scale=-8.0)
    yield from _adaptive(mixed)
    for scene in trained.scenes(vocab_size=3):
      if scene.model == _MODEL:
        yield _trained(mixed, scene)
  for name, kind in _TREE_DRAWS:
    yield _tree(name, kind, settings='mixed batch', groups=_MIXED)
  yield _tree(
    'tree',
    DraftKind.SAMPLED,
    settings='penalties, an EOS',
    groups=_PENALISED,
    eos_id=_EOS_ID,
  )
  yield _tree(
    'tree', DraftKind.SAMPLED, settings='constraint', groups=_CONSTRAINED
  )
  yield from _trained_trees()
  yield from _lattice_trees()
  yield from _growing_trees()
  yield from _filtered_trees()
  yield _other_vocabulary()
  yield from _of_memory()
  yield from _of_whole_batches()
  # For the rest one rule is enough, because rules see only probabilities.
  of_llama = functools.partial(
    Draw,
    verifier_name='block',
    settings='mixed batch, tiny Llama',
    groups=_MIXED,
  )
  for scene in trained.scenes(vocab_size=3):
    if scene.model != _MODEL:
      yield _trained(of_llama, scene)
  llama = tiny.tiny_llama(vocab_size=3)
  # Larger than at initialisation, where leaving a layer out hardly matters.
  params = jax.tree.map(lambda leaf: 1.6 * leaf, llama.init(jax.random.key(0)))
  yield _skip(
    functools.partial(of_llama, model=llama),
    'Skip',
    llama,
    params,
  )
  for name, learner, params in adapting.scenes():
    for verifier_name in ('chain', 'block'):
      yield _learning(verifier_name, name, learner, params)


def _learning(verifier_name, name, learner, params):
  return Draw(
    drafter_name=f'Online distillation of {name} after every round',
    drafter=learner.drafter,
    verifier_name=verifier_name,
    kind=DraftKind.SAMPLED,
    settings='mixed batch, tiny Llama',
    groups=_MIXED,
    model=learner.objective.target,
    params=params,
    sample=functools.partial(adapting.draw, learner=learner),
  )


def _chain(draw, name, **changes):
  model = dataclasses.replace(_MODEL, **changes)
  return draw(
    drafter_name=name,
    drafter=drafters.Chain(model=model, num_draft_tokens=2),
    kind=DraftKind.SAMPLED,
    drafts_from=lambda: (model, {}),
  )


def _adaptive(draw):
  """Yields drafters whose draft lengths depend on what earlier rounds kept."""
  model = dataclasses.replace(_MODEL, noise=0.5)
  chain = drafters.Chain(model=model, num_draft_tokens=2)
  for policy in (
    policies.AdaEDL(threshold=0.4, step=1.0, threshold_decay=0.0),
    # After one rejection it drafts one token less, after two none.
    policies.Fastest(costs=(1.0, 1.3, 1.5), strength=0.5, patience=1),
  ):
    yield draw(
      drafter_name=f'Adaptive, {type(policy).__name__}',
      drafter=drafters.Adaptive(
        drafter=chain, policies=(policy,), widths=(0, 1)
      ),
      kind=DraftKind.SAMPLED,
    )


def _tree(verifier_name, kind, **settings):
  model = dataclasses.replace(_MODEL, noise=0.5)
  chain = drafters.Chain(model=model, num_draft_tokens=_TREE.depth)
  return Draw(
    drafter_name=f'Tree, {kind.value.replace("_", " ")}',
    drafter=drafters.Tree(drafter=chain, topology=_TREE, kind=kind),
    verifier_name=verifier_name,
    kind=kind,
    **settings,
  )


# A rule and a kind for each: `Tree`'s default kind, and the kinds that draw
# siblings from its logits.
_TRAINED_TREE_DRAWS = {
  'DFlash': ('tree', DraftKind.WITHOUT_REPLACEMENT),
  'DFlash 2': ('tree', DraftKind.SAMPLED),
  'DSpark': ('traversal', DraftKind.SAMPLED),
  'DSpark, RNN': ('traversal', DraftKind.WITHOUT_REPLACEMENT),
  'Medusa': ('tree', DraftKind.POINT_MASS),
  'Hydra': ('traversal', DraftKind.WITHOUT_REPLACEMENT),
  'EAGLE': ('tree', DraftKind.SAMPLED),
  'MTP': ('greedy_draft', DraftKind.TOP_AND_SAMPLED),
}


def _trained_trees():
  for scene in trained.branching(vocab_size=3):
    if scene.name not in _TRAINED_TREE_DRAWS:
      continue
    name, kind = _TRAINED_TREE_DRAWS[scene.name]
    of = '' if scene.model == _MODEL else ', tiny Llama'
    yield Draw(
      drafter_name=f'Tree of {scene.name}, {kind.value.replace("_", " ")}',
      drafter=drafters.Tree(drafter=scene.drafter, topology=_TREE, kind=kind),
      verifier_name=name,
      kind=kind,
      settings=f'two settings{of}',
      groups=_TWO,
      model=scene.model,
      params=scene.params,
    )


def _lattice_trees():
  """Yields trees of lattices, whose shape varies by row too."""
  for scene in trained.branching(vocab_size=3):
    if scene.name in ('DFlash', 'DSpark'):
      yield Draw(
        drafter_name=f'LatticeTree of {scene.name}',
        drafter=drafters.LatticeTree(
          drafter=scene.drafter, num_draft_tokens=3, candidates=2
        ),
        verifier_name='tree',
        kind=DraftKind.POINT_MASS,
        settings='two settings, tiny Llama',
        groups=_TWO,
        model=scene.model,
        params=scene.params,
        is_of_one_shape=False,
      )


def _growing_trees():
  """Yields trees whose shape varies by row, so they can only be sampled."""
  chain = drafters.Chain(
    model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=2
  )
  for drafter in (
    drafters.DynamicTree(drafter=chain, num_draft_tokens=3, width=2),
    drafters.NgramTree(num_branches=2, depth=2, min_ngram=1),
  ):
    yield Draw(
      drafter_name=type(drafter).__name__,
      drafter=drafter,
      verifier_name='tree',
      kind=DraftKind.POINT_MASS,
      settings='mixed batch',
      groups=_MIXED,
      is_of_one_shape=False,
    )


def _other_vocabulary():
  scene = trained.other_vocabulary()
  return Draw(
    drafter_name=scene.name,
    drafter=scene.drafter,
    verifier_name='block',
    kind=DraftKind.SAMPLED,
    settings='mixed batch',
    groups=_MIXED,
    params=scene.params,
  )


def _of_memory():
  """Yields cases in which some rows draft from memory.

  The other rows draw their drafts, or have none.
  """
  chain = drafters.Chain(
    model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=2
  )
  either = trained.either(chain)
  of_tree = lambda kind: trained.either(
    drafters.Tree(drafter=chain, topology=_TREE, kind=kind)
  )
  for scene, name, kind in (
    (trained.remembering(), 'chain', DraftKind.POINT_MASS),
    (either, 'block', DraftKind.SAMPLED),
    (either, 'coupled', DraftKind.SAMPLED),
    (of_tree(DraftKind.POINT_MASS), 'tree', DraftKind.POINT_MASS),
    (of_tree(DraftKind.SAMPLED), 'traversal', DraftKind.SAMPLED),
  ):
    yield Draw(
      drafter_name=scene.name,
      drafter=scene.drafter,
      verifier_name=name,
      kind=kind,
      settings='mixed batch',
      groups=_MIXED,
      params=scene.params,
      is_of_one_shape=False,
    )


def _of_whole_batches():
  """Yields pairs of rows in which one decides what the other drafts."""
  chain = drafters.Chain(
    model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=2
  )
  suffix = drafters.Suffix(num_draft_tokens=2, costs=(1.0, 1.3, 1.5))
  adaptive = drafters.Adaptive(
    drafter=chain,
    policies=(
      policies.Fastest(
        costs=(1.0, 1.3, 1.5), strength=0.5, patience=1, whole_batch=True
      ),
    ),
  )
  budget = policies.Budget(
    ladder=(0, 2, _TREE.num_nodes), costs=(1.0, 1.2, 1.5), patience=1
  )
  of_trees = drafters.Adaptive(
    drafter=drafters.Tree(drafter=chain, topology=_TREE), policies=(budget,)
  )
  either, either_tree = (
    drafters.Either(remembered=suffix, trained=inner, prior_kept=1.0)
    for inner in (adaptive, of_trees)
  )
  stores = trained.remembering().params['drafter']
  both = {'remembered': stores, 'trained': {}}
  for of_whole, drafter, name, kind, own in (
    ('Suffix', suffix, 'chain', DraftKind.POINT_MASS, stores),
    ('Adaptive', adaptive, 'block', DraftKind.SAMPLED, {}),
    ('Either', either, 'block', DraftKind.SAMPLED, both),
    ('Either of trees', either_tree, 'tree', DraftKind.POINT_MASS, both),
  ):
    yield Draw(
      drafter_name=f'{of_whole}, the whole batch decides',
      drafter=drafter,
      verifier_name=name,
      kind=kind,
      settings='pairs of rows',
      groups=_MIXED,
      params={'target': {}, 'drafter': own},
      is_of_one_shape=False,
      sample=neighbours.draw,
    )


def _filtered_trees():
  """Yields trees with fewer verified nodes than drafted ones."""
  chain = drafters.Chain(
    model=dataclasses.replace(_MODEL, noise=0.5), num_draft_tokens=2
  )
  for rule, kind, policy in (
    ('tree', DraftKind.POINT_MASS, policies.TopNodes(2)),
    (
      'tree',
      DraftKind.POINT_MASS,
      policies.Budget(ladder=(0, 2, _TREE.num_nodes), costs=(1.0, 1.2, 1.5)),
    ),
    (
      'traversal',
      DraftKind.WITHOUT_REPLACEMENT,
      policies.TokenProbability(0.4),
    ),
  ):
    of_chain = drafters.Tree(drafter=chain, topology=_TREE, kind=kind)
    yield Draw(
      drafter_name=f'Tree, {type(policy).__name__}',
      drafter=drafters.Adaptive(
        drafter=of_chain, policies=(policy,), widths=(0, 2)
      ),
      verifier_name=rule,
      kind=kind,
      settings='mixed batch',
      groups=_MIXED,
    )


def _skip(draw, name, model, params):
  layers = (0,)
  return draw(
    drafter_name=name,
    drafter=drafters.Skip(model=model, layers=layers, num_draft_tokens=2),
    kind=DraftKind.SAMPLED,
    params={'target': params},
    drafts_from=lambda: (
      model.keep_layers(layers),
      model.keep_params(params, layers),
    ),
  )


def _trained(draw, scene):
  return draw(
    drafter_name=scene.name,
    drafter=scene.drafter,
    kind=DraftKind.SAMPLED,
    model=scene.model,
    params=scene.params,
  )
