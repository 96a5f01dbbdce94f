"""The loop of a training run: steps, metrics, checkpoints, evaluations.

A run gives the same numbers however often it is interrupted: step i reads batch
i and a key of its own, and steps that a kill lost are computed again.
"""

from collections.abc import Mapping
import dataclasses
import functools
import time
from typing import Any, cast

import jax
import numpy as np

from experiments.command import distributed
from experiments.command import progress
from experiments.training import checkpoints as checkpoints_lib
from experiments.training import data
from experiments.training import decoding_check
from experiments.training import held_out
from experiments.training import plan as plan_lib
from experiments.training import records as records_lib
from experiments.training import speed
from experiments.training import tensorboard
from experiments.training import training as training_lib
from experiments.training_data import batches as batches_lib
from specsample import drafters
from specsample import sharding
from specsample.training import on_policy
from specsample.training import operations as operations_lib
from specsample.training import step as step_lib
from specsample.types import Params


class LossError(Exception):
  """The loss, its gradient or the update of the weights is NaN or infinite."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
  """A run that resumes from its checkpoints and journal."""

  training: training_lib.Training
  split: data.Split
  params: Params  # before the first step
  records: records_lib.Records
  checkpoints: checkpoints_lib.RunCheckpoints
  observe: tensorboard.Observe = (
    tensorboard.observe_nothing
  )  # called with what is journalled

  def plan(self) -> plan_lib.Plan:
    """Returns the start of the decay and the last step, as things stand."""
    return plan(self.training, self._batches, self.records)

  def run(self) -> Params:
    """Trains up to the last step, unless that has been done already.

    Returns:
      The whole parameter tree of the step with the most tokens per round.
    """
    state, frozen = step_lib.init(
      self.params, self._is_trained(), self.training.optimizer, self._dtype
    )
    plan = self.plan()
    state = self.checkpoints.restore(state, plan) or state
    first = int(state.step)
    if first < plan.num_steps:
      self.checkpoints.forget_other_decays(plan)
      self.records.begin_segment(first)
    saved_at = time.monotonic()
    with progress.meter(plan.num_steps, first, 'steps') as meter:
      meter(first, 'compiling')
      while int(state.step) < plan.num_steps:
        state = self._report(state, frozen, plan, meter)
        step = int(state.step)
        if self._is_evaluated(step, plan):
          self._evaluate(state, frozen, plan)
          plan = self.plan()  # begins the decay if patience has run out
        if step in (plan.decay_start, plan.num_steps) or self._is_old(saved_at):
          self.checkpoints.save(state, plan)
          saved_at = time.monotonic()
    state = self.checkpoints.restore_best(state, plan)
    return step_lib.join(state.trained, frozen, self._dtype)

  def _is_old(self, saved_at: float) -> bool:
    """Returns whether the last checkpoint is, by the clock of process 0."""
    age = time.monotonic() - saved_at
    is_old = np.asarray([age >= self.training.checkpoint_seconds])
    return bool(distributed.from_first(is_old)[0])

  def _report(
    self,
    state: step_lib.TrainState,
    frozen: Params,
    plan: plan_lib.Plan,
    meter: progress.Meter,
  ) -> step_lib.TrainState:
    """Takes the steps up to the next report, and journals it."""
    training = self.training
    begin = time.monotonic()
    first = int(state.step)
    last = first + training.report_every
    description = self._description(plan)
    reports: list[Mapping[str, Any]] = []
    num_tokens, operations = 0, 0.0
    for number in range(first, last):
      batch = self._given(number, state, frozen)
      num_tokens += int(batch['mask'].sum())
      operations += self._operations(batch)
      state, report = step_lib.train_step(
        state,
        frozen,
        held_out.place(batch),
        objective=training.objective,
        optimizer=training.optimizer,
        dtype=self._dtype,
        scales=training.scales(plan, number),
        num_parts=self._num_parts(batch),
      )
      reports.append(report)
      # Checked one step late, so that the device always has work queued.
      if len(reports) > 1:
        check_finite(reports[-2], number)
      meter(number + 1, description)
    check_finite(reports[-1], last)
    means = jax.tree.map(
      lambda *values: np.mean([np.asarray(x) for x in values], axis=0).tolist(),
      *reports,
    )
    del means['is_finite']
    if self.records.get(plan, records_lib.TRAIN, last) is None:
      self._write(
        plan,
        records_lib.TRAIN,
        {
          'step': last,
          **speed.measured(
            *(num_tokens, operations, time.monotonic() - begin, self._peak)
          ),
          **means,
        },
      )
    return state

  def _is_evaluated(self, step: int, plan: plan_lib.Plan) -> bool:
    every = self.training.evaluate_every
    before = step - self.training.report_every
    return step == plan.num_steps or step // every > before // every

  def _evaluate(
    self, state: step_lib.TrainState, frozen: Params, plan: plan_lib.Plan
  ) -> None:
    """Evaluates a state, and keeps its weights if they are the best so far."""
    # A step that is repeated after a kill keeps its journalled values.
    step = int(state.step)
    known = self.records.get(plan, records_lib.HELD_OUT, step)
    params = step_lib.join(state.trained, frozen, self._dtype)
    values = known or self._measure(step, params)
    best = self.checkpoints.best(plan)
    if best is None or values['tokens_per_round'] > best['tokens_per_round']:
      self.checkpoints.save_best(state, plan)
    if known is None:
      self._write(plan, records_lib.HELD_OUT, values)

  def _measure(self, step: int, params: Params) -> dict[str, Any]:
    begin = time.monotonic()
    loss, replayed = held_out.evaluate(
      params,
      self._held_out.once(),
      self.training.objective,
      self.training.target.tokenizer.eos_ids,
    )
    if not np.isfinite(loss):
      raise LossError(
        f'after step {step} the loss on held-out answers is {loss}'
      )
    replay_seconds = time.monotonic() - begin
    decoded = decoding_check.decode(
      decoding_check.setup(self.training, params), self.prompts
    )
    shares = lambda stats: [
      None if np.isnan(x) else x for x in stats.acceptance_by_position
    ]
    return {
      'step': step,
      'loss': loss,
      'tokens_per_round': decoded.tokens_per_round,
      'acceptance_by_position': shares(decoded),
      'tokens': decoded.tokens,
      'replayed_tokens_per_round': replayed.tokens_per_round,
      'replayed_acceptance_by_position': shares(replayed),
      'replayed_tokens': replayed.tokens,
      'replayed_seconds': round(replay_seconds, 6),
      'seconds': round(time.monotonic() - begin, 3),
    }

  def _write(
    self, plan: plan_lib.Plan, kind: str, values: dict[str, Any]
  ) -> None:
    self.records.add(plan, kind, values['step'], values)
    self.observe((kind, values['step']), values)

  def _given(self, number, state, frozen):
    """Returns a step's batch, possibly with answers of the draft model."""
    batch = self._batches[number]
    rng = np.random.default_rng([self.training.seed, number])
    if rng.random() >= self.training.on_policy_share:
      return batch
    return on_policy.resample(
      step_lib.join(state.trained, frozen, self._dtype),
      held_out.place(batch),
      jax.random.key(int(rng.integers(2**31))),
      drafter=cast(drafters.DraftModel, self.training.objective.drafter),
      temperature=self.training.on_policy_temperature,
      end_ids=self.training.target.tokenizer.eos_ids,
    )

  def _description(self, plan: plan_lib.Plan) -> str:
    train = self.records.curve(plan, records_lib.TRAIN)
    found = self.records.curve(plan, records_lib.HELD_OUT)
    parts = []
    if train:
      parts = [f'loss {train[-1]["loss"]:.3f}', speed.describe(train[-1])]
    if found:
      parts.append(f'{found[-1]["tokens_per_round"]:.3f} tokens per round')
    return ', '.join(parts)

  @functools.cached_property
  def _peak(self) -> float | None:
    mesh = jax.sharding.get_mesh()
    return speed.peak_flops(
      jax.devices()[:1] if mesh.empty else list(mesh.devices.flat)
    )

  def _operations(self, batch: step_lib.Batch) -> float:
    """Returns the operations of a step, 0 if nothing is to be said of them."""
    if self._peak is None:
      return 0.0
    return operations_lib.count(
      *(self.training.objective, self.params, batch),
      trains_target=self.training.trains_target,
    )

  def _num_parts(self, batch: step_lib.Batch) -> int:
    """Returns the number of parts over which the gradient is accumulated."""
    if sharding.token_parts() == 1:
      return self.training.accumulation_steps
    # The compiler divides tokens only if a device has a single row at a time.
    return len(batch['mask']) // sharding.batch_parts()

  @property
  def _dtype(self) -> str:
    return self.training.target.model.dtype

  def _is_trained(self) -> Params:
    trains_target = self.training.trains_target
    return {
      'target': jax.tree.map(lambda _: trains_target, self.params['target']),
      'drafter': self.training.objective.drafter.is_trained(),
    }

  @functools.cached_property
  def _batches(self) -> batches_lib.Batches:
    return self.training.batches(self.split.train)

  @functools.cached_property
  def _held_out(self) -> batches_lib.Batches:
    batches = self.training.batches(self.split.held_out)
    if sharding.token_parts() == 1:
      return batches
    return dataclasses.replace(batches, batch_size=sharding.batch_parts())

  @functools.cached_property
  def prompts(self) -> list[list[int]]:
    """The prompts that the decoding loop answers."""
    return decoding_check.choose_prompts(self.training, self.split.prompts)


def plan(
  training: training_lib.Training,
  batches: batches_lib.Batches,
  records: records_lib.Records,
) -> plan_lib.Plan:
  """Returns the start of the decay and the last step.

  Args:
    training: the settings.
    batches: the batches of all data.
    records: the records of the run so far.
  """
  return plan_lib.Plan.of(
    steps=training.num_steps(batches),
    unit=training.report_every,
    decay=training.decay,
    taken=records.taken,
    stop=records.stop(training.patience),
  )


def check_finite(report, step):
  if not report['is_finite']:
    raise LossError(
      f'step {step} cannot be taken: the loss is {float(report["loss"])}, the '
      f'gradient has norm {float(report["gradient_norm"])}, or the update is '
      'NaN or infinite'
    )
