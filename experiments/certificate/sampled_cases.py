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
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.testing import acceptance
from specsample.testing import adapting
from specsample.testing import cases
from specsample.testing import grammar
from specsample.testing import sample as sample_lib
from specsample.testing import trained
from specsample.testing.conditional import Conditional
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Proposal
from specsample.testing.sample import Group
from specsample.testing.trained import Trained
from specsample.types import DraftKind, Verifier

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
  'chain': acceptance.tree,
  'block': acceptance.multi_path_block,
  # `coupled.law` takes only point masses, for which it is the token rule.
  'coupled': acceptance.tree,
  'tree': acceptance.tree,
  'traversal': acceptance.traversal,
  'k_seq': acceptance.k_seq,
  'greedy_draft': acceptance.greedy_draft,
  'multi_path_block': acceptance.multi_path_block,
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
  """A drafter, a rule and settings, whose output is sampled."""

  scene: Trained
  verifier_name: str
  kind: DraftKind
  _: dataclasses.KW_ONLY
  settings: str = 'mixed batch'
  groups: tuple[Group, ...] = _MIXED
  eos_id: int | None = None
  # Whether drafts have the same shape in all rows. Only then is the number of
  # kept drafts predicted.
  is_of_one_shape: bool = True
  sample: Callable[..., sample_lib.Sample] = sample_lib.draw

  @property
  def name(self) -> str:
    """A description of what is sampled."""
    return f'{self.scene.name} + {self.verifier_name}, {self.settings}'

  @property
  def decoder(self) -> Decoder:
    """What is sampled from."""
    rule = ALL_VERIFIERS[self.verifier_name]
    return Decoder(self.scene.model, self.scene.drafter, rule)


_on_llama = functools.partial(Draw, settings='mixed batch, tiny Llama')
_penalised = functools.partial(
  Draw, settings='penalties, an EOS', groups=_PENALISED, eos_id=_EOS_ID
)
_of_any_shape = functools.partial(Draw, is_of_one_shape=False)
_of_hash = functools.partial(trained.untrained, _MODEL)


def draws() -> Iterator[Draw]:
  """Yields every drafter with rules for its drafts, and a worst case."""
  point_mass, sampled = DraftKind.POINT_MASS, DraftKind.SAMPLED
  scenes = list(trained.scenes(vocab_size=3))
  ngram = drafters.Ngram(num_draft_tokens=2, min_ngram=1)
  pard = drafters.PARD(model=_DRAFT, num_draft_tokens=2, mask_token_id=2)
  skip = drafters.Skip(model=_MODEL, layers=(0,), num_draft_tokens=2)
  unlikely = dataclasses.replace(_MODEL, scale=-8.0)
  worst = drafters.Chain(model=unlikely, num_draft_tokens=2)
  falling = policies.AdaEDL(threshold=0.4, step=1.0, threshold_decay=0.0)
  adaptive = [
    _of_hash(
      drafters.Adaptive(drafter=_CHAIN, policies=(policy,), widths=(0, 1)),
      f'Adaptive, {type(policy).__name__}',
    )
    for policy in (falling, _FASTEST)
  ]
  for name in VERIFIERS:
    yield Draw(_of_hash(drafters.NoDraft()), name, point_mass)
    yield Draw(_of_hash(ngram), name, point_mass)
    yield Draw(_of_hash(_CHAIN), name, sampled)
    yield Draw(_of_hash(pard), name, sampled)
    yield Draw(_of_hash(skip), name, sampled)
    yield _penalised(_of_hash(_CHAIN), name, sampled)
    scene = _of_hash(worst, 'Chain of the least likely tokens')
    yield Draw(scene, name, sampled)
    for scene in (*adaptive, *scenes):
      if scene.model == _MODEL:
        yield Draw(scene, name, sampled)
  for name, kind in _TREE_DRAWS:
    yield Draw(_tree(kind), name, kind)
  yield _penalised(_tree(sampled), 'tree', sampled)
  yield Draw(
    _tree(sampled),
    'tree',
    sampled,
    settings='constraint',
    groups=_CONSTRAINED,
  )
  yield from _trained_trees()
  # The shapes of these trees vary by row, so they can only be sampled.
  for drafter in (
    drafters.DynamicTree(drafter=_CHAIN, num_draft_tokens=3, width=2),
    drafters.NgramTree(num_branches=2, depth=2, min_ngram=1),
  ):
    yield _of_any_shape(_of_hash(drafter), 'tree', point_mass)
  yield from _filtered_trees()
  yield Draw(trained.other_vocabulary(), 'block', sampled)
  yield from _of_memory()
  yield from _of_whole_batches()
  # For the rest one rule is enough, because rules see only probabilities.
  for scene in scenes:
    if scene.model != _MODEL:
      yield _on_llama(scene, 'block', sampled)
  llama = trained.tiny_llama(vocab_size=3)
  # Larger than at initialisation, where leaving a layer out hardly matters.
  params = jax.tree.map(lambda leaf: 1.6 * leaf, llama.init(jax.random.key(0)))
  skip = drafters.Skip(model=llama, layers=(0,), num_draft_tokens=2)
  scene = Trained('Skip', llama, skip, {'target': params})
  yield _on_llama(scene, 'block', sampled)
  for name, learner, params in adapting.scenes():
    scene = Trained(
      f'Online distillation of {name} after every round',
      learner.objective.target,
      learner.drafter,
      params,
    )
    draw = functools.partial(adapting.draw, learner=learner)
    for verifier_name in ('chain', 'block'):
      yield _on_llama(scene, verifier_name, sampled, sample=draw)


def _tree(kind):
  whole = drafters.Tree(drafter=_CHAIN, topology=_TREE, kind=kind)
  return _of_hash(whole, f'Tree, {kind.value.replace("_", " ")}')


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
      whole = dataclasses.replace(
        scene,
        name=f'Tree of {scene.name}, {kind.value.replace("_", " ")}',
        drafter=drafters.Tree(drafter=scene.drafter, topology=_TREE, kind=kind),
      )
      settings = f'two settings{of}'
      yield Draw(whole, verifier_name, kind, settings=settings, groups=_TWO)
  for scene in scenes:
    if scene.name in ('DFlash', 'DSpark'):
      lattice = dataclasses.replace(
        scene,
        name=f'LatticeTree of {scene.name}',
        drafter=drafters.LatticeTree(
          drafter=scene.drafter, num_draft_tokens=3, candidates=2
        ),
      )
      yield _of_any_shape(
        lattice,
        'tree',
        DraftKind.POINT_MASS,
        settings='two settings, tiny Llama',
        groups=_TWO,
      )


def _filtered_trees():
  """Yields trees with fewer verified nodes than drafted ones."""
  budget = policies.Budget(
    ladder=(0, 2, _TREE.num_nodes), costs=(1.0, 1.2, 1.5)
  )
  for verifier_name, kind, policy in (
    ('tree', DraftKind.POINT_MASS, policies.TopNodes(2)),
    ('tree', DraftKind.POINT_MASS, budget),
    (
      'traversal',
      DraftKind.WITHOUT_REPLACEMENT,
      policies.TokenProbability(0.4),
    ),
  ):
    filtered = drafters.Adaptive(
      drafter=_tree(kind).drafter, policies=(policy,), widths=(0, 2)
    )
    scene = _of_hash(filtered, f'Tree, {type(policy).__name__}')
    yield Draw(scene, verifier_name, kind)


def _of_memory():
  """Yields cases in which some rows draft from memory.

  The other rows draw their drafts, or have none.
  """
  either = trained.either(_CHAIN)
  of_tree = lambda kind: trained.either(_tree(kind).drafter)
  for scene, name, kind in (
    (trained.remembering(), 'chain', DraftKind.POINT_MASS),
    (either, 'block', DraftKind.SAMPLED),
    (either, 'coupled', DraftKind.SAMPLED),
    (of_tree(DraftKind.POINT_MASS), 'tree', DraftKind.POINT_MASS),
    (of_tree(DraftKind.SAMPLED), 'traversal', DraftKind.SAMPLED),
  ):
    yield _of_any_shape(scene, name, kind)


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
    params = {'target': {}, 'drafter': own}
    name = f'{name}, the whole batch decides'
    yield _of_any_shape(
      Trained(name, _MODEL, drafter, params),
      verifier_name,
      kind,
      settings='pairs of rows',
      sample=sample_lib.draw_in_pairs,
    )
