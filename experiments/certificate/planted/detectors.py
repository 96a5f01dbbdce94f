"""Detectors: each turns one version of the code into a statistic.

They share everything with the tests of the shipped code except the component
that is exchanged.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import drafters
from specsample import sampling as sampling_lib
from specsample import verify
from specsample.drafter import Drafter
from specsample.loop import decode
from specsample.loop import passes
from specsample.loop import step
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.testing import acceptance
from specsample.testing import cases
from specsample.testing import conditional as conditional_lib
from specsample.testing import drafted
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import law as law_lib
from specsample.testing import pairs
from specsample.testing import precision
from specsample.testing import proposal as proposal_lib
from specsample.testing import sample as sample_lib
from specsample.testing import trained
from specsample.testing.conditional import Conditional
from specsample.testing.conditional import Warp
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.testing.trained import Trained
from specsample.tree import Topology
from specsample.types import DraftKind, Model, Params, Verifier

PLAIN = Sampling(temperature=1.0)
MODEL = HashModel(vocab_size=3)
# About half of its drafts are accepted.
CHAIN = drafters.Chain(
  model=dataclasses.replace(MODEL, noise=0.6), num_draft_tokens=2
)


def tree(topology: Topology, kind: DraftKind) -> drafters.Tree:
  """Returns a drafter of trees that drafts with the model of `CHAIN`."""
  inner = dataclasses.replace(CHAIN, num_draft_tokens=topology.depth)
  return drafters.Tree(drafter=inner, topology=topology, kind=kind)


_TOLERANCE = 1e-12
_ROUNDING = 1e-5  # of probabilities in float32
_NUM_ROWS = 32768


@functools.cache
def _params() -> Params:
  """Returns the map of another vocabulary; hash models have no parameters.

  It is made on demand, because arrays start JAX, and tests of commands fork.
  """
  return trained.other_vocabulary().params


# It has no store: after some strings, it drafts from the row's own text.
EITHER = drafters.Either(
  remembered=drafters.Suffix(num_draft_tokens=2, min_kept=0.7),
  trained=CHAIN,
  prior_kept=0.8,
)


def params_of_either() -> Params:
  """Returns no store, and no parameters for the chain."""
  return {'target': {}, 'drafter': {'trained': {}}}


@dataclasses.dataclass(frozen=True)
class Reading:
  """A statistic, and the threshold that the shipped code does not exceed."""

  statistic: float
  threshold: float
  detector: str

  @property
  def alarm(self) -> bool:
    """Whether the detector says that something is wrong."""
    # NaN raises the alarm too.
    return not self.statistic <= self.threshold


@functools.cache
def enumerated(
  verifier: Verifier = verify.chain,
  drafter: Drafter = CHAIN,
  sampling: Sampling = PLAIN,
  params: Callable[[], Params] = _params,
  model: Model = MODEL,
) -> Reading:
  """Returns the largest error in a string's probability, after two rounds."""
  target, law = _tables(model, sampling)
  proposal = drafted.from_drafter(
    drafter, params(), model, cases.PROMPT, sampling, rounds=2
  )
  return _of_strings(enumerate_lib.Enumeration(verifier, proposal, target), law)


@functools.cache
def paired(drafter: Drafter, model: Model, draft_model: Model) -> Reading:
  """Returns how far the tokens of two rows are from independent ones.

  It is the largest error in the probability of the two strings together, after
  two rounds. The errors of a single row would be none.
  """
  found = pairs.joint_law(
    verify.chain,
    drafter,
    model=model,
    draft_model=draft_model,
    prompt=cases.PROMPT,
    rounds=2,
  )
  of_row = conditional_lib.joint_law(
    conditional_lib.from_model(model, {}, cases.PROMPT), 2
  )
  error = float(np.abs(found - np.outer(of_row, of_row)).max())
  return Reading(error, _ROUNDING, 'exact enumeration of two rows, in float32')


# Five tokens, for `cases.EVERY_SETTING`.
_WIDE = HashModel(vocab_size=5)
_WIDE_CHAIN = drafters.Chain(
  model=dataclasses.replace(_WIDE, noise=0.6), num_draft_tokens=1
)


@functools.cache
def everywhere(
  warp: Warp,
) -> tuple[enumerate_lib.Enumeration, Conditional, Conditional]:
  """Applies all settings by `warp`, on both sides.

  Returns the enumeration, and the target's distributions by `warp` and without
  it.
  """
  sampling = cases.EVERY_SETTING
  target, law = _tables(_WIDE, sampling, warp)
  params: Params = {'target': {}, 'drafter': {}}
  proposal = drafted.from_drafter(
    _WIDE_CHAIN, params, _WIDE, cases.PROMPT, sampling, rounds=2, by=warp
  )
  return enumerate_lib.Enumeration(verify.chain, proposal, target), target, law


def warped(warp: Warp = sampling_lib.warp) -> Reading:
  """Returns what `enumerated` does if all settings are applied by `warp`."""
  enumeration, _, law = everywhere(warp)
  return _of_strings(enumeration, law)


def _of_strings(enumeration, law):
  error, _ = enumeration.error(2, law)
  return Reading(error, _TOLERANCE, 'exact enumeration, largest error')


def _tables(model, sampling, warp=sampling_lib.warp):
  logits = conditional_lib.logits_after(model, {}, cases.PROMPT)
  target = conditional_lib.from_logits(logits, cases.PROMPT, sampling, warp)
  law = law_lib.from_logits(logits, cases.PROMPT, sampling, target)
  return target, law


def given_away(
  verifier: Verifier = verify.chain, topology: Topology | None = None
) -> Reading:
  """Returns how far the drafts kept in a round are from the token rule's.

  In a tree, they are compared with those of recursive rejection.
  """
  proposal = proposal_lib.sampled(_drawn(), CHAIN.num_draft_tokens)
  if topology is not None:
    proposal = proposal_lib.tree(_drawn(), topology, DraftKind.SAMPLED)
  target = conditional_lib.from_model(MODEL, {}, cases.PROMPT)
  enumeration = enumerate_lib.Enumeration(verifier, proposal, target)
  ideal = acceptance.tree(proposal, target).sum()
  return Reading(
    float(abs(ideal - enumeration.expected_accepted())),
    _TOLERANCE,
    'exact enumeration, tokens per round',
  )


def _drawn():
  """Returns the distributions that `CHAIN` draws from."""
  return conditional_lib.from_model(CHAIN.model, {}, cases.PROMPT)


def of_tokens(
  sample: sample_lib.Sample,
  laws: list[np.ndarray],
  num_tokens: int,
  eos_id: int | None = None,
) -> Reading:
  """Tests sampled tokens against their exact laws by chi-square."""
  result = sample_lib.compare(sample, laws, eos_id)
  return Reading(
    result.statistic,
    result.threshold,
    f'chi-square of {num_tokens} tokens in {result.samples} rows',
  )


@functools.cache
def sampled(
  groups: tuple[Group, ...],
  *,
  mistake: Callable[[], contextlib.AbstractContextManager] = (
    contextlib.nullcontext
  ),
  model: Model = MODEL,
  reference: Model = MODEL,
  drafter: Drafter = CHAIN,
  verifier: Verifier = verify.chain,
  num_tokens: int = 5,
  eos_id: int | None = None,
) -> Reading:
  """Tests the compiled loop's tokens against the exact law by chi-square.

  Args:
    groups: the rows of the batch.
    mistake: returns the context in which the loop is compiled and run.
    model: the target that runs.
    reference: the target whose law is expected.
    drafter, verifier: the drafter and the rule that run.
    num_tokens: tokens per row.
    eos_id: stops a row.
  """
  # Computed outside the mistake, which would change the law as well.
  laws = sample_lib.laws(reference, {}, groups, num_tokens, eos_id)
  with mistake():
    sample = sample_lib.draw(
      Decoder(model, drafter, verifier),
      _params(),
      groups,
      jax.random.key(7),
      num_tokens=num_tokens,
      num_rows=_NUM_ROWS,
      stop=Stop(eos_ids=() if eos_id is None else (eos_id,)),
    )
  return of_tokens(sample, laws, num_tokens, eos_id)


@functools.cache
def recomputed(
  scene: Callable[[], Trained],
  change: Callable[[Any], Drafter] = lambda drafter: drafter,
) -> Reading:
  """Compares the drafts kept after two rounds with those of an empty past.

  A drafter that reads the wrong features or tokens is still exact, so only its
  acceptance shows the mistake. The statistic is the mean difference, over rows,
  in the probability of keeping the draft of a slot, in the slot where that is
  the largest. Both drafts are drawn with the same noise.

  Args:
    scene: returns the target, a drafter, and all parameters. This drafter gets
      the rows' texts at once, in a prefill, and has decoded no rounds.
    change: makes the drafter that runs in the loop.
  """
  of_scene, rows = scene(), 64
  drafter = change(of_scene.drafter)
  # On a TPU, passes over more tokens would round differently.
  with precision.on_cpu():
    state = _prefill(
      of_scene,
      drafter,
      np.tile(cases.PROMPT, (rows, 1)),
      np.full(rows, len(cases.PROMPT)),
    )
    decoder = Decoder(of_scene.model, drafter, verify.chain)
    state = decode.advance(decoder, of_scene.params, state, max_rounds=2)
    fresh = _prefill(of_scene, of_scene.drafter, state.tokens, state.length)
    fresh = dataclasses.replace(fresh, limit=state.limit, round=state.round)
    found = _kept(of_scene, drafter, state)
    expected = _kept(of_scene, of_scene.drafter, fresh)
  return Reading(
    float(np.abs(found - expected).mean(axis=0).max()),
    _ROUNDING,
    f'kept drafts of round 3 in {rows} rows, against a recomputation',
  )


def _prefill(scene, drafter, prompts, lengths):
  return decode.prefill(
    Decoder(scene.model, drafter, verify.chain),
    scene.params,
    prompts,
    lengths,
    jax.random.key(7),
    sampling=PLAIN,
    # Leaves room for a whole draft in round 3.
    max_new_tokens=3 * (drafter.num_draft_tokens + 1),
  )


def _kept(scene, drafter, state):
  """Returns the probability [B, K] of keeping each of the next drafts."""
  decoder = Decoder(scene.model, drafter, verify.chain)

  @jax.jit
  def at_least(params, state):
    draft, _ = step.propose(decoder, params, state)
    output, _ = passes.score(decoder, params, state, draft)
    law = jax.vmap(verify.chain.law)(draft, jax.nn.softmax(output.logits))
    return 1 - jnp.cumsum(law.stop[:, :-1], axis=1)

  return np.asarray(at_least(scene.params, state))


def with_features(name: str) -> Trained:
  """Returns the scene of that name, of a drafter with parameters."""
  return trained.scene(name, MODEL.vocab_size)
