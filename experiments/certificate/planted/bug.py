"""What a planted mistake is, and how each kind of mistake is detected."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from experiments.certificate.planted import detectors
from experiments.certificate.planted import drafters
from experiments.certificate.planted import loop
from experiments.certificate.planted import policies as planted_policies
from experiments.certificate.planted import rules
from experiments.certificate.planted.detectors import Reading
from specsample import tree
from specsample import verify
from specsample.drafters import Adaptive
from specsample.drafters import Chain
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.types import DraftKind


@dataclasses.dataclass(frozen=True)
class Bug:
  """A mistake, and the detector that is run with and without it.

  Attributes:
    name: as the certificate has it.
    detector: returns a reading; what it takes besides the mistake is bound.
    mistake: the arguments of the version with the mistake.
    correct: those of the shipped version, if they are not the defaults.
  """

  name: str
  detector: Callable[..., Reading]
  mistake: Mapping[str, Any]
  correct: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def planted(self) -> Reading:
    """Returns the reading with the mistake."""
    return self.detector(**self.mistake)

  def shipped(self) -> Reading:
    """Returns the reading of the shipped code."""
    return self.detector(**self.correct)


ONE_PROMPT = (Group((1, 0, 1), detectors.PLAIN),)
# Rejects often, and leaves several tokens to choose from.
_WIDE = HashModel(vocab_size=4)
_CONTRARY = Chain(
  model=dataclasses.replace(_WIDE, scale=-4.0), num_draft_tokens=1
)
BINARY = tree.Topology((0, 0, 1))
SAMPLED_TREE = detectors.tree(BINARY, DraftKind.SAMPLED)


def of_rule(name, law, shipped=verify.chain, detector=detectors.enumerated):
  """Returns a rule that decides by a mistaken law."""
  kinds = shipped.draft_kinds
  mistaken = rules.Rule(law=law, draft_kinds=kinds)
  return Bug(name, detector, {'verifier': mistaken}, {'verifier': shipped})


def of_noise(name, verifier):
  """Returns a rule that draws with noise which has drawn a token before."""
  detector = functools.partial(
    detectors.sampled,
    ONE_PROMPT,
    model=_WIDE,
    reference=_WIDE,
    drafter=_CONTRARY,
    num_tokens=2,
  )
  return Bug(name, detector, {'verifier': verifier})


def of_drafter(
  name, mistaken, shipped=detectors.CHAIN, detector=detectors.enumerated
):
  """Returns a drafter with a mistake."""
  return Bug(name, detector, {'drafter': mistaken}, {'drafter': shipped})


def of_draft(name, change, inner=detectors.CHAIN, rule=verify.chain):
  """Returns a drafter whose draft is changed before it is handed over."""
  detector = functools.partial(detectors.enumerated, rule)
  changed = drafters.Changed(drafter=inner, change=change)
  return of_drafter(name, changed, inner, detector)


def of_declared_law(
  name, inner=detectors.CHAIN, sampling=detectors.PLAIN, **rewarps
):
  """Returns a drafter that draws from another law than it declares."""
  version = functools.partial(drafters.Misdeclared, drafter=inner)
  detector = functools.partial(detectors.enumerated, sampling=sampling)
  return of_drafter(name, version(**rewarps), version(), detector)


def of_loop(name, groups, mistake, **both):
  detector = functools.partial(detectors.sampled, groups, **both)
  marked = loop.Marked(vocab_size=3, mark=mistake.__name__)
  return Bug(name, detector, {'mistake': mistake, 'model': marked})


def of_tree(name, topology, kind, change):
  """Returns a mistake in how the draft of a tree is handed over."""
  change = functools.partial(change, topology)
  return of_draft(name, change, detectors.tree(topology, kind), verify.tree)


def of_scored_tree(name, model):
  """Returns a mistake in how the target scores a tree, or keeps its path."""
  detector = functools.partial(
    detectors.sampled, ONE_PROMPT, drafter=SAMPLED_TREE, verifier=verify.tree
  )
  return Bug(name, detector, {'model': model})


def of_policy(name, policy, mistake, inner=detectors.CHAIN, rule=verify.chain):
  """Returns a mistake in a policy: it decides by what it must not know."""
  version = lambda policy: Adaptive(drafter=inner, policies=(policy,))
  detector = functools.partial(detectors.enumerated, rule)
  return of_drafter(name, version(mistake), version(policy), detector)


def of_anticipation(name, policy):
  return of_policy(name, policy, planted_policies.Anticipating(policy))


def of_acceptance(name, scene, change):
  """Returns a mistake that leaves the law alone, but not what is kept."""
  detector = functools.partial(detectors.recomputed, scene)
  return Bug(name, detector, {'change': change})


def two_nodes(kind, policy):
  """Returns a drafter of trees that a policy cuts to two nodes."""
  return Adaptive(drafter=detectors.tree(BINARY, kind), policies=(policy(2),))
