"""Distils a drafter while it drafts, from the drafts that were rejected.

Online Speculative Decoding (Liu et al., 2310.07177): between two chunks of
rounds the drafter takes a step towards the target at the positions that
`drafters.Recording` kept. The output stays exact: a round's drafts are drawn
from, and verified against, the weights that the rounds before it left, which no
token of the round itself has a say in.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specsample import checks
from specsample import types
from specsample.drafters import recording
from specsample.loop import decode
from specsample.loop.stopping import Stop
from specsample.sampling import Sampling
from specsample.training import recorded
from specsample.training import step as step_lib
from specsample.types import (
  Array,
  ArrayLike,
  DecodeState,
  Output,
  Params,
  Verifier,
)

_logger = logging.getLogger(__name__)


@types.pytree
class Learned:
  """What an update changes, and the parameters that it leaves alone."""

  train: step_lib.TrainState
  frozen: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """How a drafter learns from its rejections.

  Attributes:
    objective: a loss of `recorded` examples, and the drafter that it trains.
    optimizer: of optax; the same object in all calls.
    rounds: of decoding between two updates.
    num_positions: M, the last rejections of a row that an update learns from; a
      round has one at most.
    top_k: k, the tokens of each whose probabilities are recorded.
    rejected_only: see `drafters.Recording`.
    window: W, the tokens of each row that an update reads, up to its last one.
    num_steps: of the optimizer, an update.
  """

  objective: recorded.DraftModelObjective
  optimizer: optax.GradientTransformation
  rounds: int = 16
  num_positions: int = 16
  top_k: int = 16
  rejected_only: bool = True
  window: int = 128
  num_steps: int = 1

  def __post_init__(self):
    """Refuses updates that never come, or that read nothing."""
    for name in ('rounds', 'window', 'num_steps'):
      value = getattr(self, name)
      if not checks.is_count(value):
        raise ValueError(
          f'{name} is {value!r}: learn from an integer of at least 1'
        )
    self.drafter  # noqa: B018 (says what is wrong with the ring's settings)

  @property
  def drafter(self) -> recording.Recording:
    """What decodes: the objective's drafter, recorded."""
    return recording.Recording(
      drafter=self.objective.drafter,
      num_positions=self.num_positions,
      top_k=self.top_k,
      rejected_only=self.rejected_only,
    )

  @property
  def dtype(self) -> str:
    """Of the computation; what is learned is kept in float32."""
    return self.objective.drafter.model.dtype


def init(params: Params, learner: Learner) -> Learned:
  """What is learned before any update; `params` is the whole tree."""
  is_trained = {
    'target': jax.tree.map(lambda _: False, params['target']),
    'drafter': learner.objective.drafter.is_trained(),
  }
  train, frozen = step_lib.init(
    params, is_trained, learner.optimizer, learner.dtype
  )
  return Learned(train=train, frozen=frozen)


def params_of(learned: Learned, learner: Learner) -> Params:
  """The whole tree to decode with, in the dtype of the target."""
  return step_lib.join(learned.train.trained, learned.frozen, learner.dtype)


def update(
  state: DecodeState, learned: Learned, learner: Learner
) -> tuple[DecodeState, Learned, dict[str, Array]]:
  """Learns from what was rejected since the last update.

  An update after which a weight or the loss is no number changes nothing but
  the count of steps, and neither does one with nothing to learn from.

  Args:
    state: between two calls of `decode.advance`, whose drafter is
      `learner.drafter`. Its cache of the draft model stays as the old weights
      left it: a draft is whatever it was drawn from.
    learned: from `init`, or from the update before, which it leaves intact.
    learner: how.

  Returns:
    The state with empty rings, what is learned now, and of the update `loss`
    and `kept` before it, `loss_after`, `gradient_norm`, the number of positions
    `recorded` and whether it is there to stay, `is_finite`; [] each.
  """
  ring = state.draft.ring
  batch = recorded.examples(
    ring, state.tokens, state.length, window=learner.window
  )
  train, report = _learn(
    learned.train,
    learned.frozen,
    batch,
    objective=learner.objective,
    optimizer=learner.optimizer,
    num_steps=learner.num_steps,
    dtype=learner.dtype,
  )
  draft = dataclasses.replace(state.draft, ring=ring.emptied())
  state = dataclasses.replace(state, draft=draft)
  return state, dataclasses.replace(learned, train=train), report


@functools.partial(
  jax.jit, static_argnames=('objective', 'optimizer', 'num_steps', 'dtype')
)
def _learn(train, frozen, batch, *, objective, optimizer, num_steps, dtype):
  def take(train, _):
    return step_lib.train_step(
      train,
      frozen,
      batch,
      objective=objective,
      optimizer=optimizer,
      dtype=dtype,
    )

  new, reports = jax.lax.scan(take, train, length=num_steps)
  # A step that is finite may leave weights that are not: they would draft
  # nothing any more, so that nothing would be rejected to learn from.
  loss, _ = objective(step_lib.join(new.trained, frozen, dtype), batch)
  is_finite = jnp.all(reports['is_finite']) & jnp.isfinite(loss)
  report = jax.tree.map(lambda x: x[0], reports)
  is_taken = is_finite & (report['recorded'] > 0)
  keep = lambda new, old: jnp.where(is_taken, new, old)
  kept = jax.tree.map(keep, new, train)
  report |= {'loss_after': loss, 'is_finite': is_finite}
  return dataclasses.replace(kept, step=new.step), report


def generate(
  learned: Learned,
  prompts: ArrayLike,
  lengths: ArrayLike,
  key: Array,
  *,
  learner: Learner,
  request_ids: ArrayLike | None = None,
  model: Any,
  verify: Verifier,
  sampling: Sampling,
  max_new_tokens: ArrayLike | int,
  stop: Stop = Stop(),
  max_length: int | None = None,
) -> tuple[Output, Learned, list[dict[str, float]]]:
  """`decode.generate` with an update after every `learner.rounds` rounds.

  A row's drafts depend on the rows that are learned from beside it, and so do
  its tokens at a temperature above 0; their distribution does not.

  Args:
    learned: from `init`, or from the call before: how the drafter goes on
      learning from one batch of prompts to the next.
    learner: how; `learner.drafter` drafts.
    prompts, lengths, key, request_ids, model, verify, sampling, max_new_tokens,
    stop, max_length: as `decode.generate`'s.

  Returns:
    The output, what is learned after it, and the report of each update. An
    update that came to no number is undone, and logged with its number.
  """
  stop.check(model.vocab_size)
  params = params_of(learned, learner)
  state = decode.prefill(
    params,
    prompts,
    lengths,
    key,
    request_ids=request_ids,
    model=model,
    drafter=learner.drafter,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
    verify=verify,
  )
  reports = []
  is_done = False
  while not is_done:
    state = decode.advance(
      params,
      state,
      model=model,
      drafter=learner.drafter,
      verify=verify,
      stop=stop,
      max_rounds=learner.rounds,
    )
    state, learned, report = update(state, learned, learner)
    params = params_of(learned, learner)
    number, is_done, report = jax.device_get(
      (learned.train.step, jnp.all(state.done), report)
    )
    reports.append({name: x.item() for name, x in report.items()})
    if not report['is_finite']:
      _logger.warning(
        'the online update up to step %d came to no number (loss %s, after it '
        '%s, gradient %s): the weights before it stay',
        *(number, report['loss'], report['loss_after']),
        report['gradient_norm'],
      )
  batch = np.shape(prompts)[0]
  most = decode.most_new_tokens(state, max_new_tokens)
  output = decode.finish(state, max_new_tokens=most, batch_size=batch)
  return output, learned, reports
