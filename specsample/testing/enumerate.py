"""The exact law of several rounds of draft, verify, emit, in float64.

The enumerated code is the shipped code: a rule's `.law`, `sampling.warp`, and a
drafter's `propose` (`drafted.from_drafter`). What is expected of it is computed
by separate code (`law.from_logits`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import tree
from specsample.testing import chi_square
from specsample.testing import conditional as conditional_lib
from specsample.testing import precision
from specsample.testing.conditional import Conditional
from specsample.testing.proposal import Drafts
from specsample.testing.proposal import Proposal
from specsample.types import Array, Draft, DraftKind, Law, Verifier

# Draws for each draft, and the most likely drafts, in `compare_calls`.
_NUM_DRAWS = 4096
_NUM_DRAFTS = 4


class Enumeration:
  """Speculative decoding from a prompt, with every outcome of every round."""

  def __init__(self, verify: Verifier, proposal: Proposal, target: Conditional):
    """Stores what determines the law; nothing is computed yet.

    Args:
      verify: a rule whose `.law` accepts these drafts.
      proposal: the drafts after every string.
      target: the distributions that the drafts are verified against.
    """
    self._verify = verify
    self._proposal = proposal
    self._target = target
    self._emissions: dict[int, list[np.ndarray]] = {}

  def emissions(self, t: int) -> list[np.ndarray]:
    """Returns one round's law after every string of t tokens.

    Returns:
      K + 1 arrays (for a tree, K is its depth). The i-th, [V^t, V^i, V], is the
      probability of keeping exactly these i drafts and then emitting this
      token.
    """
    if t not in self._emissions:
      self._emissions[t] = self._round(t)
    return self._emissions[t]

  def joint_law(self, rounds: int) -> np.ndarray:
    """Returns the law of the first rounds * (K + 1) tokens.

    This is the most that the given number of rounds can emit. Strings that are
    still shorter after these rounds are completed by the target itself.
    """
    return completed(self._after(rounds), self._target)

  def error(self, rounds: int, law: Conditional) -> tuple[float, float]:
    """Returns how far `joint_law` is from plain sampling.

    Args:
      rounds: the number of rounds.
      law: the distributions that are sampled. To see mistakes in the target's
        own tables, compute them separately (`law.from_logits`).

    Returns:
      The largest absolute difference in the probability of a string, and the
      total variation distance.
    """
    found = self.joint_law(rounds)
    length = rounds * len(self.emissions(0))
    plain = conditional_lib.joint_law(law, length)
    difference = float(np.abs(found - plain).max())
    return difference, conditional_lib.total_variation(found, plain)

  def num_accepted(self, round: int = 0) -> np.ndarray:
    """Returns the distribution [K + 1] of how many drafts one round keeps."""
    kept = np.zeros(len(self.emissions(0)))
    for t, mass in self._after(round).items():
      for i, emission in enumerate(self.emissions(t)):
        kept[i] += mass @ emission.sum(axis=(1, 2))
    return kept

  def expected_accepted(self) -> float:
    """Returns the mean number of drafts that the first round keeps."""
    law = self.num_accepted()
    return float(law @ np.arange(law.size))

  def _after(self, rounds):
    """Returns the string probabilities [V^t] after some rounds, keyed by t."""
    pending = {0: np.ones(1)}
    for _ in range(rounds):
      longer: dict[int, np.ndarray] = {}
      for t, mass in pending.items():
        for i, emission in enumerate(self.emissions(t)):
          emitted = (mass[:, None, None] * emission).reshape(-1)
          longer[t + i + 1] = longer.get(t + i + 1, 0) + emitted
      pending = longer
    return pending

  def _round(self, t):
    drafts = self._proposal(t)
    count, _, num_drafts = drafts.tokens.shape
    topology = drafts.topology or tree.chain(num_drafts)
    target_probs = conditional_lib.at_nodes(
      self._target, t, drafts.tokens, topology
    )
    vocab_size = target_probs.shape[-1]
    law = _laws(self._verify, drafts, target_probs)
    mass = drafts.weights[..., None, None] * law.stop[..., None] * law.next
    row = np.arange(count)[:, None]
    emissions = [
      np.zeros((count, vocab_size**depth, vocab_size))
      for depth in range(topology.depth + 1)
    ]
    kept = [np.zeros(drafts.tokens.shape[:2], int)]
    np.add.at(emissions[0], (row, kept[0]), mass[:, :, 0])
    for i, parent in enumerate(topology.parents):
      drafted = np.maximum(drafts.tokens[..., i], 0)
      kept.append(kept[parent] * vocab_size + drafted)
      emission = emissions[topology.depths[i]]
      np.add.at(emission, (row, kept[-1]), mass[:, :, i + 1])
    return emissions


def completed(
  pending: dict[int, np.ndarray], target: Conditional
) -> np.ndarray:
  """Returns the law [V^n] of strings whose missing tokens the target draws.

  Args:
    pending: probabilities [V^t] of the strings of t tokens, keyed by t; n is
      the largest t.
    target: the distributions of the missing tokens.
  """
  longest = max(pending)
  law = np.zeros(1)
  for t in range(longest):
    law = law + pending.get(t, 0)
    law = (law[:, None] * target(t, t)).reshape(-1)
  return law + pending[longest]


def _laws(verify: Verifier, drafts: Drafts, target_probs: np.ndarray) -> Law:
  grid = drafts.tokens.shape[:2]
  flatten = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
  probs = None if drafts.probs is None else flatten(drafts.probs)
  topology = drafts.topology
  with precision.float64():
    law = conditional_lib.in_blocks(
      lambda tokens, probs, target_probs: _law_block(
        verify, topology, drafts.kind, tokens, probs, target_probs
      ),
      (flatten(drafts.tokens), probs, flatten(target_probs)),
    )
  return jax.tree.map(lambda x: x.reshape(*grid, *x.shape[1:]), law)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _law_block(verify, topology, kind, tokens, probs, target_probs):
  law = lambda tokens, probs, target_probs: verify.law(
    draft_of(topology, kind, tokens, probs), target_probs
  )
  return jax.vmap(law)(tokens, probs, target_probs)


def draft_of(
  topology: tree.Topology | None,
  kind: DraftKind,
  tokens: Array,
  probs: Array | None,
) -> Draft:
  """Returns a draft of one sequence; a chain if there is no topology."""
  shape: dict[str, Any] = {}
  if topology is not None:
    shape = {
      'parents': jnp.asarray(topology.parents, jnp.int32),
      'depth': topology.depth,
      'num_children': topology.num_children,
    }
  return Draft(tokens=tokens, probs=probs, kind=kind, **shape)


def compare_calls(
  verify: Verifier,
  proposal: Proposal,
  target: Conditional,
  key: Array,
) -> chi_square.ChiSquare:
  """Tests verdicts on the likeliest drafts after the prompt against the law.

  Enumerations read `law` alone, and the decoding loop calls the rule itself.

  Args:
    verify: the rule. If it is positional, its law must hold for these drafts.
    proposal: the drafts.
    target: the distributions that they are verified against.
    key: a PRNG key.
  """
  drafts = proposal(0)
  chosen = np.argsort(-drafts.weights[0], kind='stable')[:_NUM_DRAFTS]
  chosen = chosen[drafts.weights[0][chosen] > 0]
  tokens = drafts.tokens[:, chosen]
  topology = drafts.topology or tree.chain(tokens.shape[2])
  probs = conditional_lib.at_nodes(target, 0, tokens, topology)
  of_drafts = None if drafts.probs is None else drafts.probs[0, chosen]
  given = jax.tree.map(jnp.asarray, (tokens[0], of_drafts, probs[0]))
  law, verdicts = _draw(verify, drafts.topology, drafts.kind, key, given)
  stop, following = (np.asarray(x, np.float64) for x in (law.stop, law.next))
  mass = stop[..., None] * following  # [n, N + 1, V]
  vocab_size = mass.shape[-1]
  node = verdicts.num_accepted
  if verdicts.path is not None:
    node = jnp.max(verdicts.path, axis=-1)
  cells = np.asarray(node * vocab_size + verdicts.next_token)
  size = mass.shape[1] * vocab_size
  return chi_square.test(
    (np.bincount(own, minlength=size), of_draft.reshape(-1) / of_draft.sum())
    for own, of_draft in zip(cells, mass, strict=True)
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draw(verify, topology, kind, key, drafts) -> Any:
  """Returns the law of each draft, and [n, `_NUM_DRAWS`] verdicts."""
  tokens, probs, target_probs = drafts
  shape: tuple[int, ...] = (len(tokens), _NUM_DRAWS)
  if verify.positional:
    shape += (target_probs.shape[1],)

  def of_draft(keys, tokens, probs, target_probs):
    draft = draft_of(topology, kind, tokens, probs)
    draw = lambda key: verify(key, draft, target_probs)
    return verify.law(draft, target_probs), jax.vmap(draw)(keys)

  return jax.vmap(of_draft)(
    jax.random.split(key, shape), tokens, probs, target_probs
  )
