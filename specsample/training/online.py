"""Online distillation of a drafter from what the target says while it serves.

Online Speculative Decoding (Liu et al., 2310.07177): between two chunks of
rounds the drafter takes a step of its own training objective at the positions
that `drafters.Recording` kept. The output stays exact: a round's drafts are
drawn from, and verified against, weights that depend on earlier rounds only and
on no token of the round itself.
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
from specsample import settings
from specsample import stopping
from specsample import types
from specsample.drafters import recording
from specsample.loop import decode
from specsample.loop.decoder import Decoder
from specsample.sampling import Sampling
from specsample.stopping import Stop
from specsample.training import objective as objective_lib
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
class Learner(settings.Settings):
  """The settings with which a drafter learns while it drafts.

  Attributes:
    objective: the objective of the drafter, which it holds. The paper's has
      token_weight = 0 and teacher_weight = 1; at a temperature above 0, the
      tokens where drafts were rejected are not samples of the target.
    optimizer: an optax optimizer; the same object in all calls.
    rounds: rounds of decoding between two updates.
    rejected_only: see `drafters.Recording`.
    window: W; an update reads the last W tokens of each row, and learns the
      recorded positions among them.
    num_steps: optimizer steps per update.
  """

  objective: objective_lib.Objective
  optimizer: optax.GradientTransformation
  rounds: settings.Count = 16
  rejected_only: settings.Flag = True
  window: settings.Count = 128
  num_steps: settings.Count = 1

  def _check(self):
    checks.instance(
      'Learner.objective',
      self.objective,
      objective_lib.Objective,
      'give one of specsample.training, such as draft.DraftObjective(...)',
    )
    self.drafter  # noqa: B018 (says what is wrong with its settings)

  @property
  def drafter(self) -> recording.Recording:
    """The drafter to decode with: the objective's, in a `Recording`."""
    return recording.Recording(
      drafter=self.objective.drafter,
      model=self.objective.target,
      rejected_only=self.rejected_only,
    )

  @property
  def dtype(self) -> str:
    """The dtype of the computation; trained weights are kept in float32."""
    return self.objective.target.dtype


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
      `learner.drafter`. The drafter's caches stay as the old weights left
      them. This is exact: verification uses the distribution that a draft was
      really drawn from.
    learned: from `init` or the previous update; it stays valid.
    learner: the settings.

  Returns:
    The state with nothing left to learn, the new `Learned`, and a report: that
    of the objective's first step, with `loss` and `gradient_norm`; `loss_after`
    the update; the number of positions `recorded`; and `is_finite`, which is
    False if the update was undone because of NaN or infinity.
  """
  recorded = state.draft.recorded
  batch = examples(recorded, state.tokens, state.length, learner=learner)
  train, report = _learn(learned.train, learned.frozen, batch, learner=learner)
  draft = dataclasses.replace(state.draft, recorded=recorded.emptied())
  state = dataclasses.replace(state, draft=draft)
  return state, dataclasses.replace(learned, train=train), report


def learn(
  batch: step_lib.Batch,
  learned: Learned,
  learner: Learner,
  *,
  target: Params,
) -> tuple[Learned, dict[str, Array]]:
  """Learns from texts of a target that has moved since they were written.

  This keeps a drafter up with a policy in training: call it with each call's
  `Rollouts.documents()`. The target reads the texts again with its current
  weights, which are those that the next drafts are verified by.

  Args:
    batch: `tokens` and `mask`, as in `training.objective.Objective`.
    learned: from `init` or the previous update; it stays valid.
    learner: the settings; `rounds`, `rejected_only` and `window` are not used.
    target: the target's own current parameters.

  Returns:
    The new `Learned`, with this target, and a report as that of `update`.

  Raises:
    ValueError: `target` does not have the shapes of the objective's target; the
      message names the parameter.
  """
  model = learner.objective.target
  checks.parameters('target', model, target)
  frozen = step_lib.freeze({'target': target}, learner.dtype)
  learned = dataclasses.replace(learned, frozen=learned.frozen | frozen)
  train, report = _learn(learned.train, learned.frozen, batch, learner=learner)
  return dataclasses.replace(learned, train=train), report


@functools.partial(jax.jit, static_argnames=('learner',))
def examples(
  recorded: recording.Recorded,
  tokens: Array,
  length: Array,
  *,
  learner: Learner,
) -> step_lib.Batch:
  """Returns the last W tokens of each row as a batch of the objective.

  Args:
    recorded: of the state of `learner.drafter`.
    tokens, length: [B, S] and [B], those of the `types.DecodeState`.
    learner: the settings.

  Returns:
    `tokens` [B, W], `mask` [B, W], `hidden` [B, W, D], and `features`
    [B, W, n * D] if the drafter reads n of them.
  """
  window = min(learner.window, tokens.shape[1])
  start = jnp.maximum(length - window, 0)
  cut_row = lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, window)
  cut = lambda x: jax.vmap(cut_row)(x, start)
  outputs, dim = cut(recorded.outputs), learner.objective.target.dim
  before = jnp.pad(cut(recorded.learned), ((0, 0), (1, 0)))
  batch = {
    'tokens': cut(tokens),
    'mask': before[:, :window],
    'hidden': outputs[..., :dim],
  }
  if learner.objective.drafter.feature_layers:
    batch['features'] = outputs[..., dim:]
  return batch


@functools.partial(jax.jit, static_argnames=('learner',))
def _learn(train, frozen, batch, *, learner):
  def take(train, _):
    return step_lib.train_step(
      train,
      frozen,
      batch,
      objective=learner.objective,
      optimizer=learner.optimizer,
      dtype=learner.dtype,
    )

  new, reports = jax.lax.scan(take, train, length=learner.num_steps)
  # A finite step may still leave weights that are NaN or infinite. They would
  # draft nothing, so nothing would be rejected and learned from any more.
  params = step_lib.join(new.trained, frozen, learner.dtype)
  loss, _ = learner.objective(params, batch)
  is_finite = jnp.all(reports['is_finite']) & jnp.isfinite(loss)
  num_recorded = jnp.sum(batch['mask'])
  is_taken = is_finite & (num_recorded > 0)
  keep = lambda new, old: jnp.where(is_taken, new, old)
  kept = jax.tree.map(keep, new, train)
  report = jax.tree.map(lambda x: x[0], reports) | {
    'loss_after': loss,
    'recorded': num_recorded,
    'is_finite': is_finite,
  }
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
) -> tuple[Output, Learned, list[dict[str, Any]]]:
  """Runs `decode.generate` with an update after every `learner.rounds` rounds.

  A row's drafts depend on the other rows that are learned from, and so do its
  tokens at a temperature above 0; their distribution does not, if each call has
  a key or request ids of its own.

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
    Decoder(model, learner.drafter, verify),
    params,
    prompts,
    lengths,
    key,
    request_ids=request_ids,
    sampling=sampling,
    max_new_tokens=max_new_tokens,
    max_length=max_length,
  )
  reports = []
  is_done = False
  while not is_done:
    state = decode.advance(
      Decoder(model, learner.drafter, verify),
      params,
      state,
      stop=stop,
      max_rounds=learner.rounds,
    )
    state, learned, report = update(state, learned, learner)
    params = params_of(learned, learner)
    number, is_done, report = jax.device_get(
      (learned.train.step, jnp.all(state.done), report)
    )
    reports.append({name: x.tolist() for name, x in report.items()})
    if not report['is_finite']:
      _logger.warning(
        'the online update up to step %d gave NaN or infinity (loss %s, after '
        'it %s, gradient %s): the weights from before it are kept',
        number,
        report['loss'],
        report['loss_after'],
        report['gradient_norm'],
      )
  batch = np.shape(prompts)[0]
  output = decode.finish(state, max_new_tokens=max_new_tokens, batch_size=batch)
  return output, learned, reports
