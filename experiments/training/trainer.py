"""The loop of a training run: steps, metrics, evaluations, checkpoints.

A run gives the same numbers however often it is interrupted: step i reads batch
i and a key of its own, and steps that a kill lost are computed again.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import time
from typing import Any, cast

import jax
import numpy as np

from experiments.command import distributed
from experiments.command import progress
from experiments.training import begin as begin_lib
from experiments.training import held_out
from experiments.training import history as history_lib
from experiments.training import train_state
from experiments.training import training as training_lib
from specsample import drafters
from specsample import sharding
from specsample.cost import chips
from specsample.training import on_policy
from specsample.training import operations as operations_lib
from specsample.training import step as step_lib
from specsample.types import Params


class LossError(Exception):
  """The loss, its gradient or the update of the weights is NaN or infinite."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
  """A run that continues from its last checkpoint."""

  training: training_lib.Training
  split: begin_lib.Split
  params: Params  # before the first step
  checkpoints: train_state.Checkpoints
  history: history_lib.History  # up to the step to continue from
  # Called with the kind of each measurement and its values.
  observe: Callable[[str, dict[str, Any]], None]

  def run(self, first: int) -> Params:
    """Trains from step `first` up to the last step of the plan.

    Returns:
      The whole parameter tree of the step with the most tokens per round.
    """
    training, history = self.training, self.history
    plan, unit = history.plan, training.report_every
    optimizer = training.optimizer(plan)
    state, frozen = step_lib.init(
      self.params, self._is_trained(), optimizer, self._dtype
    )
    if first:
      state = self.checkpoints.restore(state, first)
    if first < plan.num_steps:
      self.checkpoints.drop_after(first)
      history.begin_segment(first)
    saved_at = time.monotonic()
    with progress.meter(plan.num_steps, first, 'steps') as meter:
      meter(first, 'compiling')
      for begin in range(first, plan.num_steps, unit):
        state = self._take_steps(state, frozen, optimizer, begin, meter)
        step, is_better = begin + unit, False
        if self._is_evaluated(step):
          best = history.best
          values = self._measure(
            step, step_lib.join(state.trained, frozen, self._dtype)
          )
          history.held_out.append(values)
          self.observe(history_lib.HELD_OUT, values)
          is_better = best is not history.best
        is_planned = step in (plan.decay_start, plan.num_steps)
        if is_better or is_planned or self._is_old(saved_at):
          values = dataclasses.asdict(history)
          self.checkpoints.save(state, values, history.kept())
          saved_at = time.monotonic()
    assert history.best is not None
    found = self.checkpoints.restore(state, history.best['step'])
    return step_lib.join(found.trained, frozen, self._dtype)

  def _take_steps(
    self,
    state: step_lib.TrainState,
    frozen: Params,
    optimizer: Any,
    first: int,
    meter: progress.Meter,
  ) -> step_lib.TrainState:
    """Takes the steps from `first` up to the next report, and reports them."""
    begin = time.monotonic()
    last = first + self.training.report_every
    description = self._description()
    reports: list[Mapping[str, Any]] = []
    num_tokens, operations = 0, 0.0
    for number in range(first, last):
      batch = self._batch(number, state, frozen)
      num_tokens += int(batch['mask'].sum())
      operations += self._operations(batch)
      state, report = step_lib.train_step(
        state,
        frozen,
        held_out.place(batch),
        objective=self.training.objective,
        optimizer=optimizer,
        dtype=self._dtype,
        num_parts=self._num_parts(batch),
        num_learned=self.training.objective.num_learned,
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
    seconds = time.monotonic() - begin
    values = {
      'step': last,
      'answer_tokens': num_tokens,
      'seconds': round(seconds, 3),
    }
    if self._peak_flops is not None:
      share = operations / seconds / self._peak_flops
      values['share_of_peak'] = round(share, 6)
    self.history.train.append(values | means)
    self.observe(history_lib.TRAIN, values | means)
    return state

  def _batch(self, number, state, frozen):
    """Returns a step's batch, possibly with answers of the draft model."""
    batch = self._batches[number]
    rng = np.random.default_rng([self.training.seed, number])
    if rng.random() >= self.training.on_policy_share:
      return batch
    return on_policy.resample(
      step_lib.join(state.trained, frozen, self._dtype),
      held_out.place(batch),
      jax.random.key(int(rng.integers(2**31))),
      drafter=cast(drafters.DraftModel, self.training.drafter),
      temperature=self.training.on_policy_temperature,
      end_ids=self.training.target.tokenizer.eos_ids,
    )

  def _is_evaluated(self, step: int) -> bool:
    every = self.training.evaluate_every
    before = step - self.training.report_every
    is_last = step == self.history.plan.num_steps
    return is_last or step // every > before // every

  def _measure(self, step: int, params: Params) -> dict[str, Any]:
    begin = time.monotonic()
    training = self.training
    batches = training.batches(self.split.held_out)
    if sharding.token_parts() > 1:
      batches = dataclasses.replace(batches, batch_size=sharding.batch_parts())
    loss, replayed = held_out.evaluate(
      params,
      batches.once(),
      training.objective,
      training.target.tokenizer.eos_ids,
    )
    if not np.isfinite(loss):
      raise LossError(
        f'after step {step} the loss on held-out answers is {loss}'
      )
    replay_seconds = time.monotonic() - begin
    prompts = held_out.choose_prompts(training, self.split.prompts)
    decoded = held_out.decode(held_out.setup(training, params), prompts)
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

  def _is_old(self, saved_at: float) -> bool:
    """Returns whether the last checkpoint is, by the clock of process 0."""
    age = time.monotonic() - saved_at
    return distributed.from_first(age >= self.training.checkpoint_seconds)

  def _description(self) -> str:
    parts = []
    if self.history.train:
      last = self.history.train[-1]
      rate = last['answer_tokens'] / last['seconds']
      parts = [f'loss {last["loss"]:.3f}', f'{rate:,.0f} tokens/s']
      if 'share_of_peak' in last:
        parts.append(f'{last["share_of_peak"]:.1%} of peak')
    if self.history.held_out:
      rounds = self.history.held_out[-1]['tokens_per_round']
      parts.append(f'{rounds:.3f} tokens per round')
    return ', '.join(parts)

  @functools.cached_property
  def _peak_flops(self) -> float | None:
    """The bfloat16 operations per second of all devices; None if not known."""
    mesh = jax.sharding.get_mesh()
    devices = jax.devices()[:1] if mesh.empty else list(mesh.devices.flat)
    chip = chips.of_kind(devices[0].device_kind)
    return None if chip is None else len(devices) * chip.flops

  def _operations(self, batch: step_lib.Batch) -> float:
    """Returns the operations of a step, 0 if nothing is to be said of them."""
    if self._peak_flops is None:
      return 0.0
    return operations_lib.count(
      self.training.objective,
      self.params,
      batch,
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
      'drafter': self.training.drafter.is_trained(),
    }

  @functools.cached_property
  def _batches(self):
    return self.training.batches(self.split.train)


def check_finite(report: Mapping[str, Any], step: int) -> None:
  """Raises LossError if a step could not be taken."""
  if not report['is_finite']:
    raise LossError(
      f'step {step} cannot be taken: the loss is {float(report["loss"])}, the '
      f'gradient has norm {float(report["gradient_norm"])}, or the update is '
      'NaN or infinite'
    )
