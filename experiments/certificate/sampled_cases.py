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
from specsample.drafter import Drafter
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import adapting
from specsample.testing import cases
from specsample.testing import grammar
from specsample.testing import sample as sample_lib
from specsample.testing import tiny
from specsample.testing import trained
from specsample.testing import tree_acceptance
from specsample.testing.conditional import Conditional
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Proposal
from specsample.testing.sample import Group
from specsample.types import DraftKind, Model, Params, Verifier

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
ALL_VERIFIERS = VERIFIERS | TREE_VERIFIERS
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
_DRAFT = dataclasses.replace(_MODEL, noise=0.5)
_CHAIN = drafters.Chain(model=_DRAFT, num_draft_tokens=2)
# Costs of rounds of 0, 1 and 2 drafts. After one rejection, the policy drafts
# one token less, after two none.
_COSTS = (1.0, 1.3, 1.5)
_FASTEST = policies.Fastest(costs=_COSTS, strength=0.5, patience=1)
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


@dataclasses.dataclass(frozen=True)
class Draw:
  """One combination that is sampled."""

  drafter_name: str
  drafter: Drafter
  verifier_name: str
  kind: DraftKind
  _: dataclasses.KW_ONLY
  settings: str = 'mixed batch'
  groups: tuple[Group, ...] = _MIXED
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

  @property
  def decoder(self) -> Decoder:
    """What is sampled from."""
    rule = ALL_VERIFIERS[self.verifier_name]
    return Decoder(self.model, self.drafter, rule)


_on_llama = functools.partial(Draw, settings='mixed batch, tiny Llama')
_penalised = functools.partial(
  Draw, settings='penalties, an EOS', groups=_PENALISED, eos_id=_EOS_ID
)
_of_any_shape = functools.partial(Draw, is_of_one_shape=False)


def draws() -> Iterator[Draw]:
  """Yields every drafter with rules for its drafts, and a worst case."""
  scenes = list(trained.scenes(vocab_size=3))
  for name in VERIFIERS:
    yield Draw('NoDraft', drafters.NoDraft(), name, DraftKind.POINT_MASS)
    ngram = drafters.Ngram(num_draft_tokens=2, min_ngram=1)
    yield Draw('Ngram', ngram, name, DraftKind.POINT_MASS)
    yield _chain('Chain', _CHAIN, name)
    pard = drafters.PARD(model=_DRAFT, num_draft_tokens=2, mask_token_id=2)
    yield Draw('PARD', pard, name, DraftKind.SAMPLED)
    yield _skip(Draw, name, _MODEL, {})
    yield _chain('Chain', _CHAIN, name, _penalised)
    unlikely = dataclasses.replace(_MODEL, scale=-8.0)
    worst = drafters.Chain(model=unlikely, num_draft_tokens=2)
    yield _chain('Chain of the least likely tokens', worst, name)
    for policy in (
      policies.AdaEDL(threshold=0.4, step=1.0, threshold_decay=0.0),
      _FASTEST,
    ):
      yield Draw(
        f'Adaptive, {type(policy).__name__}',
        drafters.Adaptive(drafter=_CHAIN, policies=(policy,), widths=(0, 1)),
        name,
        DraftKind.SAMPLED,
      )
    for scene in scenes:
      if scene.model == _MODEL:
        yield _trained(scene, name, DraftKind.SAMPLED)
  for name, kind in _TREE_DRAWS:
    yield _tree(name, kind)
  yield _tree('tree', DraftKind.SAMPLED, _penalised)
  yield _tree(
    'tree',
    DraftKind.SAMPLED,
    functools.partial(Draw, settings='constraint', groups=_CONSTRAINED),
  )
  yield from _trained_trees()
  yield from _growing_trees()
  yield from _filtered_trees()
  yield _trained(trained.other_vocabulary(), 'block', DraftKind.SAMPLED)
  yield from _of_memory()
  yield from _of_whole_batches()
  # For the rest one rule is enough, because rules see only probabilities.
  for scene in scenes:
    if scene.model != _MODEL:
      yield _trained(scene, 'block', DraftKind.SAMPLED, _on_llama)
  llama = tiny.tiny_llama(vocab_size=3)
  # Larger than at initialisation, where leaving a layer out hardly matters.
  params = jax.tree.map(lambda leaf: 1.6 * leaf, llama.init(jax.random.key(0)))
  on_llama = functools.partial(_on_llama, model=llama)
  yield _skip(on_llama, 'block', llama, params)
  for name, learner, params in adapting.scenes():
    for verifier_name in ('chain', 'block'):
      yield _on_llama(
        f'Online distillation of {name} after every round',
        learner.drafter,
        verifier_name,
        DraftKind.SAMPLED,
        model=learner.objective.target,
        params=params,
        sample=functools.partial(adapting.draw, learner=learner),
      )


def _chain(name, chain, verifier_name, draw=Draw):
  return draw(
    name,
    chain,
    verifier_name,
    DraftKind.SAMPLED,
    drafts_from=lambda: (chain.model, {}),
  )


def _skip(draw, verifier_name, model, params):
  layers = (0,)
  return draw(
    'Skip',
    drafters.Skip(model=model, layers=layers, num_draft_tokens=2),
    verifier_name,
    DraftKind.SAMPLED,
    params={'target': params},
    drafts_from=lambda: (
      model.keep_layers(layers),
      model.keep_params(params, layers),
    ),
  )


def _trained(scene, verifier_name, kind, draw=Draw):
  return draw(
    scene.name,
    scene.drafter,
    verifier_name,
    kind,
    model=scene.model,
    params=scene.params,
  )


def _tree(verifier_name, kind, draw=Draw):
  return draw(
    f'Tree, {kind.value.replace("_", " ")}',
    drafters.Tree(drafter=_CHAIN, topology=_TREE, kind=kind),
    verifier_name,
    kind,
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
  """Yields trees, and trees of lattices, whose shape varies by row too."""
  scenes = list(trained.branching(vocab_size=3))
  for scene in scenes:
    if scene.name in _TRAINED_TREE_DRAWS:
      verifier_name, kind = _TRAINED_TREE_DRAWS[scene.name]
      of = '' if scene.model == _MODEL else ', tiny Llama'
      yield Draw(
        f'Tree of {scene.name}, {kind.value.replace("_", " ")}',
        drafters.Tree(drafter=scene.drafter, topology=_TREE, kind=kind),
        verifier_name,
        kind,
        settings=f'two settings{of}',
        groups=_TWO,
        model=scene.model,
        params=scene.params,
      )
  for scene in scenes:
    if scene.name in ('DFlash', 'DSpark'):
      yield _of_any_shape(
        f'LatticeTree of {scene.name}',
        drafters.LatticeTree(
          drafter=scene.drafter, num_draft_tokens=3, candidates=2
        ),
        'tree',
        DraftKind.POINT_MASS,
        settings='two settings, tiny Llama',
        groups=_TWO,
        model=scene.model,
        params=scene.params,
      )


def _growing_trees():
  """Yields trees whose shape varies by row, so they can only be sampled."""
  for drafter in (
    drafters.DynamicTree(drafter=_CHAIN, num_draft_tokens=3, width=2),
    drafters.NgramTree(num_branches=2, depth=2, min_ngram=1),
  ):
    name = type(drafter).__name__
    yield _of_any_shape(name, drafter, 'tree', DraftKind.POINT_MASS)


def _filtered_trees():
  """Yields trees with fewer verified nodes than drafted ones."""
  for verifier_name, kind, policy in (
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
    whole = drafters.Tree(drafter=_CHAIN, topology=_TREE, kind=kind)
    yield Draw(
      f'Tree, {type(policy).__name__}',
      drafters.Adaptive(drafter=whole, policies=(policy,), widths=(0, 2)),
      verifier_name,
      kind,
    )


def _of_memory():
  """Yields cases in which some rows draft from memory.

  The other rows draw their drafts, or have none.
  """
  either = trained.either(_CHAIN)
  of_tree = lambda kind: trained.either(
    drafters.Tree(drafter=_CHAIN, topology=_TREE, kind=kind)
  )
  for scene, name, kind in (
    (trained.remembering(), 'chain', DraftKind.POINT_MASS),
    (either, 'block', DraftKind.SAMPLED),
    (either, 'coupled', DraftKind.SAMPLED),
    (of_tree(DraftKind.POINT_MASS), 'tree', DraftKind.POINT_MASS),
    (of_tree(DraftKind.SAMPLED), 'traversal', DraftKind.SAMPLED),
  ):
    yield _trained(scene, name, kind, _of_any_shape)


def _of_whole_batches():
  """Yields pairs of rows in which one decides what the other drafts."""
  suffix = drafters.Suffix(num_draft_tokens=2, costs=_COSTS)
  fastest = dataclasses.replace(_FASTEST, whole_batch=True)
  adaptive = drafters.Adaptive(drafter=_CHAIN, policies=(fastest,))
  budget = policies.Budget(
    ladder=(0, 2, _TREE.num_nodes), costs=(1.0, 1.2, 1.5), patience=1
  )
  of_trees = drafters.Adaptive(
    drafter=drafters.Tree(drafter=_CHAIN, topology=_TREE), policies=(budget,)
  )
  either, either_tree = (
    drafters.Either(remembered=suffix, trained=inner, prior_kept=1.0)
    for inner in (adaptive, of_trees)
  )
  stores = trained.remembering().params['drafter']
  both = {'remembered': stores, 'trained': {}}
  for name, drafter, verifier_name, kind, own in (
    ('Suffix', suffix, 'chain', DraftKind.POINT_MASS, stores),
    ('Adaptive', adaptive, 'block', DraftKind.SAMPLED, {}),
    ('Either', either, 'block', DraftKind.SAMPLED, both),
    ('Either of trees', either_tree, 'tree', DraftKind.POINT_MASS, both),
  ):
    yield _of_any_shape(
      f'{name}, the whole batch decides',
      drafter,
      verifier_name,
      kind,
      settings='pairs of rows',
      params={'target': {}, 'drafter': own},
      sample=sample_lib.draw_in_pairs,
    )
