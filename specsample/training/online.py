"""Online distillation of a drafter from the drafts that were rejected.

Online Speculative Decoding (Liu et al., 2310.07177): between two chunks of
rounds the drafter takes a step towards the target at the positions that
`drafters.Recording` kept. The output stays exact: a round's drafts are drawn
from, and verified against, weights that depend on earlier rounds only and on no
token of the round itself.
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
from specsample.loop import stopping
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
  """The training state that an update changes, and the frozen parameters."""

  train: step_lib.TrainState
  frozen: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """The settings with which a drafter learns from its rejections.

  Attributes:
    objective: a loss of `recorded` examples, with the drafter that it trains.
    optimizer: an optax optimizer; the same object in all calls.
    rounds: rounds of decoding between two updates.
    num_positions: M; an update learns from the last M rejections of a row, of
      which a round has at most one.
    top_k: k, the tokens per position whose probabilities are recorded.
    rejected_only: see `drafters.Recording`.
    window: W; an update reads the last W tokens of each row.
    num_steps: optimizer steps per update.
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
    """Refuses updates that would never happen, or read nothing."""
    for name in ('rounds', 'window', 'num_steps'):
      checks.count(name, getattr(self, name))
    self.drafter  # noqa: B018 (says what is wrong with the ring's settings)

  @property
  def drafter(self) -> recording.Recording:
    """The drafter to decode with: the objective's, in a `Recording`."""
    return recording.Recording(
      drafter=self.objective.drafter,
      num_positions=self.num_positions,
      top_k=self.top_k,
      rejected_only=self.rejected_only,
    )

  @property
  def dtype(self) -> str:
    """The dtype of the computation; trained weights are kept in float32."""
    return self.objective.drafter.model.dtype


def init(params: Params, learner: Learner) -> Learned:
  """Returns the state before any update; `params` is the whole tree."""
  is_trained = {
    'target': jax.tree.map(lambda _: False, params['target']),
    'drafter': learner.objective.drafter.is_trained(),
  }
  train, frozen = step_lib.init(
    params, is_trained, learner.optimizer, learner.dtype
  )
  return Learned(train=train, frozen=frozen)


def params_of(learned: Learned, learner: Learner) -> Params:
  """Returns the whole tree to decode with, in the dtype of the target."""
  return step_lib.join(learned.train.trained, learned.frozen, learner.dtype)


def update(
  state: DecodeState, learned: Learned, learner: Learner
) -> tuple[DecodeState, Learned, dict[str, Array]]:
  """Learns from the positions that were recorded since the last update.

  An update whose weights or loss become NaN or infinite changes only the step
  count, and so does one with nothing to learn from.

  Args:
    state: the state between two calls of `decode.advance` with
      `learner.drafter`. Its cache of the draft model stays as the old weights
      left it. This is exact: verification uses the distribution that a draft
      was really drawn from.
    learned: from `init` or the previous update; it stays valid.
    learner: the settings.

  Returns:
    The state with empty rings, the new `Learned`, and a report with [] each:
    `loss`, `kept` and `gradient_norm` of the first step, `loss_after` the
    update, the number of positions `recorded`, and `is_finite`, which is False
    if the update was undone because of NaN or infinity.
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
  # A finite step may still leave weights that are NaN or infinite. They would
  # draft nothing, so that nothing would be rejected and learned from any more.
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
  """Runs `decode.generate` with an update after every `learner.rounds` rounds.

  A row's drafts depend on the other rows that are learned from, and so do its
  tokens at a temperature above 0; their distribution does not.

  Args:
    learned: from `init`, or from the previous call, so that the drafter keeps
      learning from one batch of prompts to the next.
    learner: the settings; `learner.drafter` drafts.
    prompts, lengths, key, request_ids, model, verify, sampling, max_new_tokens,
    stop, max_length: as in `decode.generate`.

  Returns:
    The output, the new `Learned`, and the report of each update. An update that
    produced NaN or infinity is undone, and logged with its step number.
  """
  stopping.check(stop, model)
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
        'the online update up to step %d gave NaN or infinity (loss %s, after '
        'it %s, gradient %s): the weights from before it are kept',
        *(number, report['loss'], report['loss_after']),
        report['gradient_norm'],
      )
  batch = np.shape(prompts)[0]
  most = decode.most_new_tokens(state, max_new_tokens)
  output = decode.finish(state, max_new_tokens=most, batch_size=batch)
  return output, learned, reports
