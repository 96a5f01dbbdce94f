"""Mistakes with weights that move: of rollouts, and of drafters that learn.

A rollout's policy moves from call to call, and a drafter that learns moves
while it drafts.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.certificate.planted import detectors
from experiments.certificate.planted import drafters
from experiments.certificate.planted.detectors import Reading
import specsample
from specsample import types
from specsample import verify
from specsample.drafter import Drafter
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.testing import adapting
from specsample.testing import cases as cases_lib
from specsample.testing import conditional
from specsample.testing import enumerate as enumerate_lib
from specsample.testing import law as law_lib
from specsample.testing import sample as sample_lib
from specsample.testing import second_call
from specsample.testing import trained
from specsample.testing.hash_model import HashModel
from specsample.testing.sample import Group
from specsample.training import online
from specsample.training.rollout import Rollouts
from specsample.types import DraftKind, Params

_NUM_TOKENS = 4
_NUM_ROWS = 4096
# The largest error of log-probabilities in float32.
_ROUNDING = 1e-5
_POLICIES = (HashModel(vocab_size=3), HashModel(vocab_size=3, seed=1))
_GROUPS = (Group((1, 0, 1), detectors.PLAIN),)


def of_the_policy_before(rollouts: Rollouts) -> Rollouts:
  """Gives the tokens the log-probabilities of the weights before the step."""
  before = second_call.params(0)['target']
  stale = rollouts.score(before, second_call.MODEL)
  return dataclasses.replace(rollouts, model_log_probs=stale)


def before_warping(rollouts: Rollouts) -> Rollouts:
  """Passes log-probabilities before warping as those after it."""
  return dataclasses.replace(
    rollouts, warped_log_probs=rollouts.model_log_probs
  )


@functools.cache
def _second_rollouts() -> Rollouts:
  """Returns the rollouts of a policy that has taken a step since the first."""
  model, rollouts = second_call.MODEL, None
  history = specsample.History(vocab_size=model.vocab_size, every=1)
  for step in range(2):
    rollouts = specsample.rollout(
      {'target': second_call.params(step)['target']},
      [cases_lib.PROMPT],
      jax.random.fold_in(jax.random.key(7), step),
      model=model,
      drafter=second_call.SUFFIX,
      verify=verify.chain,
      sampling=second_call.SAMPLING,
      num_samples=16,
      max_prompt_length=8,
      max_new_tokens=_NUM_TOKENS,
      history=history,
    )
  assert rollouts is not None
  return rollouts


@functools.cache
def recomputed(
  change: Callable[[Rollouts], Rollouts] = lambda rollouts: rollouts,
) -> Reading:
  """Compares both log-probabilities with those of exact tables.

  Args:
    change: makes the rollouts that are compared.
  """
  rollouts = change(_second_rollouts())
  tokens = np.asarray(rollouts.tokens).reshape(-1, _NUM_TOKENS)
  logits = conditional.logits_after(
    second_call.MODEL, second_call.params(1)['target'], cases_lib.PROMPT
  )
  error = 0.0
  for sampling, found in (
    (second_call.SAMPLING, rollouts.warped_log_probs),
    (detectors.PLAIN, rollouts.model_log_probs),
  ):
    like = conditional.from_logits(logits, cases_lib.PROMPT, sampling)
    law = law_lib.from_logits(logits, cases_lib.PROMPT, sampling, like)
    for i, values in enumerate(np.moveaxis(np.asarray(found)[0], -1, 0)):
      string = conditional.index(tokens[:, :i], second_call.MODEL.vocab_size)
      expected = np.log(law(i, i)[string, tokens[:, i]])
      error = max(error, float(np.abs(values - expected).max()))
  return Reading(
    error, _ROUNDING, f'log-probabilities of {len(tokens)} rows, against tables'
  )


@functools.cache
def remembering(have_same_key: bool = False) -> Reading:
  """Tests a second call's tokens by chi-square, each row with a history.

  A row's history holds what the first call wrote for it. In a history of
  thousands of rows, the text of a single one would have too little effect.

  Args:
    have_same_key: whether both calls have the same key, a mistake.
  """
  keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(2)]
  if have_same_key:
    keys = [jax.random.key(7)] * 2
  before, now = (
    Decoder(model, second_call.SUFFIX, verify.chain) for model in _POLICIES
  )
  first = sample_lib.draw(
    before,
    trained.remembering().params,
    _GROUPS,
    keys[0],
    num_tokens=_NUM_TOKENS,
    num_rows=_NUM_ROWS,
  )
  stores = [
    second_call.store_of(np.append(_GROUPS[0].prompt, row), 3)
    for row in first.tokens
  ]

  def run(shared, state, store):
    params = shared | {'drafter': {'store': store}}
    return decode.advance(now, params, state, max_rounds=_NUM_TOKENS)

  sample = sample_lib.draw_in_batches(
    run,
    now,
    {'target': {}, 'drafter': {'store': stores[0]}},
    _GROUPS,
    keys[1],
    own=(jax.tree.map(lambda *x: np.stack(x), *stores),),
    num_tokens=_NUM_TOKENS,
    num_rows=_NUM_ROWS,
    at_once=len(stores),
  )
  laws = sample_lib.laws(_POLICIES[1], {}, _GROUPS, _NUM_TOKENS)
  return detectors.of_tokens(sample, laws, _NUM_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequencyAsLaw(drafters.Wrapper):
  """Declares remembered tokens as drawn with their frequency in the history.

  The rule then corrects for a draw that never happened, by what others wrote.
  """

  size: int  # V

  def propose(self, params, draw, warp, tokens, length, state):
    draft, state = super().propose(params, draw, warp, tokens, length, state)
    stored = params['drafter']['history'].tokens
    counts = jnp.sum(stored[:, None] == jnp.arange(self.size), axis=0)
    probs = jnp.broadcast_to(
      counts / jnp.sum(counts), (*draft.tokens.shape, self.size)
    )
    probs = jnp.where(draft.tokens[..., None] >= 0, probs, 0)
    declared = types.Draft(
      tokens=draft.tokens, probs=probs, kind=DraftKind.SAMPLED
    )
    return declared, state


def frequency_as_law(drafter: Drafter) -> Drafter:
  """Returns the drafter with that mistake."""
  return FrequencyAsLaw(drafter=drafter, size=second_call.MODEL.vocab_size)


@functools.cache
def enumerated(
  change: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> Reading:
  """Returns the largest error in a second call, whatever the first wrote.

  Args:
    change: makes the drafter of the second call.
  """
  errors = []
  for case in second_call.cases_of(second_call.SUFFIX, change):
    enumeration = enumerate_lib.Enumeration(
      verify.chain, case.proposal, case.target
    )
    errors.append(enumeration.error(2, case.law)[0])
  return Reading(
    float(np.max(errors)), 1e-12, 'exact enumeration, largest error'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnsBeforeItDeclares(drafters.Wrapper):
  """A drafter that updates its weights between the draw and the verdict.

  Tokens are drawn with the old weights, but `probs` come from the new ones.
  """

  learner: online.Learner
  step_size: float = 4.0  # the learning rate in `adapting.scenes`

  def propose(self, params, draw, warp, tokens, length, state):
    drawn, _ = super().propose(params, draw, warp, tokens, length, state)
    new = self._learned(params, tokens, length, state)
    return super().propose(
      new, drafters.repeat(drawn.tokens, length), warp, tokens, length, state
    )

  def _learned(self, params, tokens, length, state) -> Params:
    batch = online.examples(
      state.recorded, tokens, length, learner=self.learner
    )

    def loss(own):
      return self.learner.objective(params | {'drafter': own}, batch)[0]

    step = lambda x, slope: x - self.step_size * slope
    own = params['drafter']
    return params | {'drafter': jax.tree.map(step, own, jax.grad(loss)(own))}


@functools.cache
def learning(is_mistaken: bool = False) -> Reading:
  """Tests the adapting loop's tokens against the exact law by chi-square."""
  _, learner, params = next(adapting.scenes())
  num_tokens = 5
  # After an update there is nothing to learn. With one every two rounds, there
  # is something in every second round.
  learner = dataclasses.replace(learner, rounds=2)
  drafter: Drafter = learner.drafter
  if is_mistaken:
    drafter = LearnsBeforeItDeclares(drafter=drafter, learner=learner)
  model = learner.objective.target
  sample = adapting.draw(
    Decoder(model, drafter, verify.chain),
    params,
    _GROUPS,
    jax.random.key(7),
    learner=learner,
    num_tokens=num_tokens,
    num_rows=_NUM_ROWS,
  )
  laws = sample_lib.laws(model, params['target'], _GROUPS, num_tokens)
  return detectors.of_tokens(sample, laws, num_tokens)
