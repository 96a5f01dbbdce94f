"""The proposals and targets over which a rule is enumerated."""

from collections.abc import Iterator
import dataclasses
import functools
import itertools

import numpy as np

from specsample import drafters
from specsample import policies
from specsample import tree
from specsample.constraint import Automaton
from specsample.constraint import Constraint
from specsample.policies.policy import Policy
from specsample.sampling import Sampling
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import grammar
from specsample.testing import law as law_lib
from specsample.testing import proposal as proposal_lib
from specsample.testing import trained
from specsample.testing.conditional import Conditional
from specsample.testing.hash_model import HashModel
from specsample.testing.proposal import Cut
from specsample.testing.proposal import Proposal
from specsample.testing.trained import Trained
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Case:
  """A target, a way of drafting, and the numbers of rounds to enumerate."""

  name: str
  kind: DraftKind
  vocab_size: int
  num_draft_tokens: int
  rounds: tuple[int, ...]
  proposal: Proposal
  target: Conditional
  # The target's distributions again, not computed by `sampling.warp`.
  law: Conditional
  topology: tree.Topology | None = None  # None for a chain


PROMPT = (1, 0, 1)  # with an n-gram to find
_PLAIN = Sampling(temperature=1.0)
# For five tokens. If any one of these is left out, the target's law changes.
EVERY_SETTING = Sampling(
  temperature=1.5,
  top_k=3,
  top_p=0.85,
  min_p=0.3,
  repetition_penalty=1.4,
  presence_penalty=0.3,
  frequency_penalty=0.4,
  logit_bias=np.asarray([1.0, -0.5, -1.0, 0.5, 0.0]),
  constraint=Constraint(automaton=grammar.OneForbidden(5)),
)


def standard_cases(drafter_rounds: int = 3) -> Iterator[Case]:
  """Yields `rule_cases`, and cases of the shipped drafters and policies.

  Args:
    drafter_rounds: the number of rounds for the shipped drafters, 2 or 3. Most
      of the time for a third round goes to drafting after each string of two.
  """
  yield from rule_cases()
  yield from drafter_cases(drafter_rounds)
  yield from policy_cases()


def rule_cases() -> Iterator[Case]:
  """Yields the cases for every rule: K = 1..3, V = 2..4, 2 and 3 rounds.

  V = 4 with K = 3 has too many strings (4 ** 12) for a third round.
  """
  for vocab_size, num_draft_tokens in _SHAPES:
    rounds = (2,) if (vocab_size, num_draft_tokens) == (4, 3) else (2, 3)
    scenes = _SCENES if num_draft_tokens == 2 else _SCENES[:_EVERYWHERE]
    for scene in scenes:
      yield from _scene_cases(scene, vocab_size, num_draft_tokens, rounds)
  yield from _worked_example()


def drafter_cases(rounds: int = 3) -> Iterator[Case]:
  """Yields cases that enumerate the shipped drafters' own `propose`."""
  target = HashModel(vocab_size=3)
  other = dataclasses.replace(target, noise=0.5)
  point_mass, sampled = DraftKind.POINT_MASS, DraftKind.SAMPLED
  ngram = drafters.Ngram(num_draft_tokens=2, min_ngram=1)
  chain = drafters.Chain(model=other, num_draft_tokens=2)
  skip = drafters.Skip(model=target, layers=(0,), num_draft_tokens=2)
  pard = drafters.PARD(model=other, num_draft_tokens=2, mask_token_id=2)
  settings = (
    ('top-p', Sampling(temperature=0.8, top_p=0.9)),
    (
      'penalties',
      Sampling(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5),
    ),
  )
  for scene, kind in (
    (trained.untrained(target, drafters.NoDraft()), point_mass),
    (trained.untrained(target, ngram), point_mass),
    (trained.untrained(target, chain), sampled),
    (trained.untrained(target, skip), sampled),
    (trained.untrained(target, pard), sampled),
    (trained.other_vocabulary(), sampled),
    *((scene, sampled) for scene in trained.scenes(vocab_size=3)),
    (trained.remembering(), point_mass),
    (trained.either(ngram), point_mass),
    (trained.either(chain), sampled),
  ):
    for setting, sampling in settings:
      name = f'drafters.{scene.name}, {setting}'
      yield of_scene(name, scene, sampling, rounds, kind)
  wide = HashModel(vocab_size=5)
  chain = drafters.Chain(
    model=dataclasses.replace(wide, noise=0.5), num_draft_tokens=2
  )
  for drafter, kind in ((ngram, point_mass), (chain, sampled)):
    scene = trained.untrained(wide, drafter)
    name = f'drafters.{scene.name}, every setting'
    yield of_scene(name, scene, EVERY_SETTING, 2, kind)


def of_scene(
  name: str,
  scene: Trained,
  sampling: Sampling,
  rounds: int = 2,
  kind: DraftKind | None = None,
) -> Case:
  """Returns the case that enumerates a drafter's own `propose`.

  Args:
    name: the name of the case, for messages.
    scene: the drafter and its target, of a vocabulary of few tokens.
    sampling: scalar settings.
    rounds: the most rounds to enumerate, at least 2.
    kind: the kind of the drafts; None to make them and see.
  """
  target, law = _twice(scene.model, scene.params['target'], sampling)
  proposal = drafted.from_drafter(
    scene.drafter,
    scene.params,
    scene.model,
    PROMPT,
    sampling,
    rounds=rounds,
  )
  return Case(
    name=name,
    kind=proposal(0).kind if kind is None else kind,
    vocab_size=scene.model.vocab_size,
    num_draft_tokens=scene.drafter.num_draft_tokens,
    rounds=tuple(range(2, rounds + 1)),
    proposal=proposal,
    target=target,
    law=law,
    topology=scene.drafter.topology,
  )


def _twice(model, params, sampling):
  """Returns the target's distributions by `warp`, and by `law`."""
  logits = conditional_lib.logits_after(model, params, PROMPT)
  target = conditional_lib.from_logits(logits, PROMPT, sampling)
  return target, law_lib.from_logits(logits, PROMPT, sampling, target)


# With thresholds that some of the hash model's drafts pass and others do not.
POLICIES = (
  policies.TokenProbability(0.4),
  policies.PathProbability(0.3),
  policies.TopK(1),
  policies.LargestProbability(0.6),
  policies.SVIP(0.97),
  policies.AdaEDL(threshold=0.57),
  policies.Fixed(1),
)


def policy_cases() -> Iterator[Case]:
  """Yields a case for every filter of drawn drafts, applied by `Adaptive`."""
  model = HashModel(vocab_size=3)
  chain = drafters.Chain(
    model=dataclasses.replace(model, noise=0.6), num_draft_tokens=3
  )
  sampling = Sampling(temperature=1.2, presence_penalty=0.5)
  confident = trained.confident(vocab_size=3)
  for policy, scene in (
    *((policy, trained.untrained(model, chain)) for policy in POLICIES),
    (policies.Confidence(0.5), confident),
    (policies.ConfidenceProduct(0.3), confident),
    (policies.EarlyStopping(costs=(1.0, 1.4, 1.9, 2.5)), confident),
  ):
    drafter = drafters.Adaptive(drafter=scene.drafter, policies=(policy,))
    name = f'policies.{type(policy).__name__} of {scene.name}'
    scene = dataclasses.replace(scene, drafter=drafter)
    yield of_scene(name, scene, sampling, kind=DraftKind.SAMPLED)


# Siblings only, deep and wide trees, and one that is not numbered by depth.
_TOPOLOGIES = {
  'siblings': tree.k_ary((3,)),
  'binary': tree.k_ary((2, 1)),
  'depth first': tree.Topology((0, 1, 1, 0)),
  'deep': tree.Topology((0, 0, 1, 3)),
}


def tree_cases() -> Iterator[Case]:
  """Yields trees of every kind, and trees from the shipped drafters, V = 3."""
  names = 'plain', 'temperature and top-k', 'greedy', 'disjoint'
  scenes = [scene for scene in _SCENES if scene.name in names]
  for kind, name, scene in itertools.product(DraftKind, _TOPOLOGIES, scenes):
    yield _tree_case(name, _TOPOLOGIES[name], scene, kind)
  # With two siblings this unlikely, even the best rule sometimes rejects both:
  # the optimal acceptance is below 1.
  contrary = _Scene('contrary', noise=0.0, draft_scale=-4.0)
  for kind in (DraftKind.SAMPLED, DraftKind.WITHOUT_REPLACEMENT):
    yield _tree_case('two siblings', tree.k_ary((2,)), contrary, kind)
  (scene,) = (scene for scene in _SCENES if scene.name == 'constraint')
  topology = _TOPOLOGIES['binary']
  yield _tree_case('binary', topology, scene, DraftKind.SAMPLED)
  sampling = Sampling(temperature=0.8, top_k=2, presence_penalty=0.5)
  for drafted_tree, kind in _drafted_trees():
    name = f'drafters.{drafted_tree.name}, top-k and a penalty'
    yield of_scene(name, drafted_tree, sampling, kind=kind)


def _tree_case(name, topology, scene, kind):
  draft, target, law = _scene_tables(scene, vocab_size=3)
  return Case(
    name=f'{name}, {scene.name}',
    kind=kind,
    vocab_size=3,
    num_draft_tokens=topology.num_nodes,
    # Three rounds of depth 2 are 3 ** 9 strings, which take a minute.
    rounds=(2,),
    proposal=proposal_lib.tree(draft, topology, kind),
    target=target,
    law=law,
    topology=topology,
  )


def _drafted_trees() -> Iterator[tuple[Trained, DraftKind]]:
  """Yields drafters whose `propose` goes through `drafters.Tree`."""
  model = HashModel(vocab_size=3)
  chain = drafters.Chain(
    model=dataclasses.replace(model, noise=0.5), num_draft_tokens=2
  )
  tree_of = lambda drafter, kind: drafters.Tree(
    drafter=drafter, topology=tree.Topology((0, 0, 1)), kind=kind
  )
  for kind in DraftKind:
    whole = tree_of(chain, kind)
    yield trained.untrained(model, whole), kind
    # Whether a tree goes on after a node may depend on its token, for any kind.
    of_a_tree: list[Policy] = [policies.TokenProbability(0.5)]
    if kind is DraftKind.POINT_MASS:
      best = policies.Budget(ladder=(0, 2, 3), costs=(1.0, 1.05, 1.6))
      of_a_tree += [policies.TopNodes(2), best]
    for policy in of_a_tree:
      filtered = drafters.Adaptive(drafter=whole, policies=(policy,))
      name = f'Tree, {type(policy).__name__}'
      yield trained.untrained(model, filtered, name), kind
  kind = DraftKind.WITHOUT_REPLACEMENT
  skip = drafters.Skip(model=model, layers=(0,), num_draft_tokens=2)
  yield trained.untrained(model, tree_of(skip, kind), 'Tree of Skip'), kind
  # All but DFlash give the second slot of a block the token before it.
  for scene in trained.branching(vocab_size=3):
    if scene.name in ('DFlash', 'DFlash 2', 'DSpark', 'DSpark, RNN'):
      whole, name = tree_of(scene.drafter, kind), f'Tree of {scene.name}'
      yield dataclasses.replace(scene, name=name, drafter=whole), kind


def after_the_draw(threshold: float) -> Cut:
  """Returns a cut that stops after the first unlikely draft token.

  It is non-anticipating: token i is kept, however unlikely, if the tokens
  before it were likely enough.
  """

  def cut(tokens, probs):
    drawn = np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    sure = np.cumprod(drawn >= threshold, axis=-1)
    return 1 + sure[..., :-1].sum(axis=-1)

  return cut


def before_the_draw(threshold: float) -> Cut:
  """Returns a cut before the first draw whose best token is unlikely."""

  def cut(tokens, probs):
    del tokens
    return np.cumprod(probs.max(axis=-1) >= threshold, axis=-1).sum(axis=-1)

  return cut


def _worked_example():
  """Yields Sun et al.'s example: `chain` keeps 10/9 drafts, `block` 11/9."""
  context_free = lambda *probs: lambda t, _: np.tile(probs, (2**t, 1))
  target = context_free(1 / 3, 2 / 3)
  yield Case(
    name='worked example',
    kind=DraftKind.SAMPLED,
    vocab_size=2,
    num_draft_tokens=2,
    rounds=(2, 3),
    proposal=proposal_lib.sampled(context_free(2 / 3, 1 / 3), 2),
    target=target,
    law=target,
  )


@dataclasses.dataclass(frozen=True)
class _Scene:
  name: str
  target: Sampling = _PLAIN
  draft: Sampling = _PLAIN
  noise: float = 0.5
  draft_scale: float = 4.0
  cut: Cut = proposal_lib.keep_all


def _both(name, sampling):
  return _Scene(name, sampling, sampling)


def _forbid(*ids):
  """Returns settings that forbid `ids`, of 0..3; `_tables` cuts the bias."""
  return Sampling(temperature=1.0, logit_bias=_bias(ids))


def constrained_by(automaton: Automaton, start: int | None = None) -> Sampling:
  """Returns settings of temperature 1 whose tokens follow an automaton."""
  constraint = Constraint(automaton=automaton, start=start)
  return Sampling(temperature=1.0, constraint=constraint)


def _bias(ids):
  return tuple(-np.inf if i in ids else 0.0 for i in range(4))


_SCENES = (
  _Scene('plain'),
  _both('temperature and top-k', Sampling(temperature=0.6, top_k=2)),
  _both('greedy', Sampling(temperature=0.0)),
  _Scene('cut after the draw', cut=after_the_draw(0.4)),
  _both('top-p', Sampling(temperature=0.8, top_p=0.7)),
  _both('min-p', Sampling(temperature=1.5, min_p=0.5)),
  _both(
    'penalties',
    Sampling(
      temperature=1.0,
      repetition_penalty=1.3,
      presence_penalty=0.5,
      frequency_penalty=0.4,
    ),
  ),
  _both('constraint', constrained_by(grammar.OneForbidden(4))),
  _Scene('greedy target', target=Sampling(temperature=0.0)),
  _Scene('greedy draft', draft=Sampling(temperature=0.0)),
  _Scene('draft = target', noise=0.0),
  _Scene('least likely drafts', draft_scale=-8.0),
  _Scene('zeros', target=_forbid(0), draft=_forbid(1)),
  _Scene('disjoint', target=_forbid(0, 2), draft=_forbid(1, 3)),
  _Scene('cut before the draw', cut=before_the_draw(0.5)),
)
_EVERYWHERE = 4  # this many scenes, from the first, are used at every V and K
_SHAPES = [(v, k) for v in (2, 3, 4) for k in (1, 2, 3)]


def _scene_cases(scene, vocab_size, num_draft_tokens, rounds):
  draft, target, law = _scene_tables(scene, vocab_size)
  for kind, propose in (
    (DraftKind.SAMPLED, proposal_lib.sampled),
    (DraftKind.POINT_MASS, proposal_lib.most_likely),
  ):
    yield Case(
      name=scene.name,
      kind=kind,
      vocab_size=vocab_size,
      num_draft_tokens=num_draft_tokens,
      rounds=rounds,
      proposal=propose(draft, num_draft_tokens, scene.cut),
      target=target,
      law=law,
    )


def _scene_tables(scene, vocab_size):
  """Returns the draft's distributions, and the target's as `_twice` does."""
  model = HashModel(vocab_size=vocab_size)
  other = dataclasses.replace(model, noise=scene.noise, scale=scene.draft_scale)
  draft, _ = _tables(other, scene.draft)
  return draft, *_tables(model, scene.target)


def _tables(model, sampling):
  """Fits settings to a hash model, and returns what `_twice` does."""
  if sampling.constraint is not None:
    sampling = constrained_by(grammar.OneForbidden(model.vocab_size))
  if sampling.logit_bias is None:
    return _cached_tables(model, sampling)
  bias = np.asarray(sampling.logit_bias[: model.vocab_size])
  return _twice(model, {}, dataclasses.replace(sampling, logit_bias=bias))


@functools.cache
def _cached_tables(model, sampling):
  return _twice(model, {}, sampling)
