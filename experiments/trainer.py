"""The loop of a training run: steps, metrics, checkpoints, held-out answers.

The same run gives the same numbers however often it was interrupted: step i
reads batch i and a key of its own, and what a kill lost is computed again.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import time
from typing import Any, cast

import jax
import numpy as np
import optax

from experiments import batches as batches_lib
from experiments import held_out
from experiments import journal as journal_lib
from experiments import progress
from experiments import scalars
from experiments import train_state
from experiments import training as training_lib
from specsample import drafters
from specsample.training import on_policy
from specsample.training import step as step_lib
from specsample.types import Params

# The journal's keys: ('train', step), ('held out', step) and, for the time that
# it took to find those of a folder, ('hidden vectors', digest of the data).
TRAIN, HELD_OUT, HIDDEN = 'train', 'held out', 'hidden vectors'


class LossError(Exception):
  """The loss, its gradient or what follows from it is no number."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trainer:
  """Trains from wherever the checkpoints and the journal are."""

  training: training_lib.Training
  split: training_lib.Split
  params: Params  # before the first step
  journal: journal_lib.Journal
  checkpoints: train_state.Checkpoints
  observe: scalars.Observe = scalars.observe_nothing  # what is journalled

  @property
  def steps_per_epoch(self) -> int:
    """Until every example has been learned from once."""
    return self._batches.per_epoch

  @property
  def num_steps(self) -> int:
    """Of the whole run; a whole number of reports."""
    return num_steps(self.training, self._batches)

  def run(self) -> Params:
    """The whole tree of parameters after the last step.

    Raises:
      LossError: names the step; the checkpoints before it stay.
      ValueError: a checkpoint cannot be read or written.
    """
    state, frozen = step_lib.init(
      self.params, self._is_trained(), self._optimizer, self._dtype
    )
    state = self.checkpoints.restore(state) or state
    first = int(state.step)
    saved_at = time.monotonic()
    with progress.meter(self.num_steps, first, 'steps') as meter:
      meter(first, 'compiling')
      while int(state.step) < self.num_steps:
        state = self._report(state, frozen, meter)
        is_last = int(state.step) == self.num_steps
        age = time.monotonic() - saved_at
        if is_last or age >= self.training.checkpoint_seconds:
          self.checkpoints.save(state)
          saved_at = time.monotonic()
    return step_lib.join(state.trained, frozen, self._dtype)

  def _report(
    self, state: step_lib.TrainState, frozen: Params, meter: progress.Meter
  ) -> step_lib.TrainState:
    """Takes the steps up to the next report, and writes it down."""
    training = self.training
    begin = time.monotonic()
    first = int(state.step)
    description = self._description()
    reports: list[Mapping[str, Any]] = []
    num_tokens = 0
    for number in range(first, first + training.report_every):
      batch = self._given(number, state, frozen)
      num_tokens += int(batch['mask'].sum())
      state, report = step_lib.train_step(
        state,
        frozen,
        held_out.place(batch),
        objective=training.objective,
        optimizer=self._optimizer,
        dtype=self._dtype,
      )
      reports.append(report)
      # One late, so that the device always has the next step to do.
      if len(reports) > 1:
        _check(reports[-2], number)
      meter(number + 1, description)
    _check(reports[-1], first + training.report_every)
    last = first + training.report_every
    means = jax.tree.map(
      lambda *values: np.mean([np.asarray(x) for x in values], axis=0).tolist(),
      *reports,
    )
    del means['is_finite']
    self._write(
      (TRAIN, last),
      {
        'step': last,
        'answer_tokens': num_tokens,
        'epoch': last / self.steps_per_epoch,
        'seconds': round(time.monotonic() - begin, 3),
        **means,
      },
    )
    number = last // training.report_every
    total = self.num_steps // training.report_every
    every = max(1, round(total / training.evaluations))
    if number % every == 0 or number == total:
      self._evaluate(last, step_lib.join(state.trained, frozen, self._dtype))
    return state

  def _evaluate(self, step: int, params: Params) -> None:
    begin = time.monotonic()
    loss, stats = held_out.evaluate(
      params,
      self._held_out.once(),
      self.training.objective,
      self.training.target.tokenizer.eos_ids,
    )
    if not np.isfinite(loss):
      raise LossError(
        f'after step {step} the loss of what is held out is {loss}'
      )
    self._write(
      (HELD_OUT, step),
      {
        'step': step,
        'loss': loss,
        'tokens': stats.tokens,
        'tokens_per_round': stats.tokens_per_round,
        'acceptance_by_position': [
          None if np.isnan(x) else x for x in stats.acceptance_by_position
        ],
        'seconds': round(time.monotonic() - begin, 3),
      },
    )

  def _write(self, key, value) -> None:
    # A step that is taken again after a kill has the numbers that it had.
    if key not in self.journal:
      self.journal.add(key, value)
      self.observe(key, value)

  def _given(self, number, state, frozen):
    """What a step reads: the batch, or what the draft model makes of it."""
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

  def _description(self) -> str:
    found = self.journal.of(HELD_OUT)
    return (
      f'{found[-1]["tokens_per_round"]:.3f} tokens a round' if found else ''
    )

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
  def _optimizer(self) -> optax.GradientTransformation:
    return self.training.optimizer(self.num_steps)

  @functools.cached_property
  def _batches(self) -> batches_lib.Batches:
    return batches_of(self.training, self.split.train)

  @functools.cached_property
  def _held_out(self) -> batches_lib.Batches:
    return batches_of(self.training, self.split.held_out)


def num_steps(
  training: training_lib.Training, batches: batches_lib.Batches
) -> int:
  """Of a whole run over the batches; a whole number of reports."""
  steps = training.epochs * batches.per_epoch
  return max(1, round(steps / training.report_every)) * training.report_every


def check(
  journal: journal_lib.Journal, checkpoints: train_state.Checkpoints
) -> None:
  """Refuses a checkpoint of another run.

  Raises:
    ValueError: the journal does not know its step.
  """
  step = checkpoints.step
  if step and (TRAIN, step) not in journal:
    train_state.refuse_step(step)


def observe_again(
  journal: journal_lib.Journal, observe: scalars.Observe
) -> None:
  """Tells of all that is in the journal, of which a kill may lose the last."""
  for kind in (TRAIN, HELD_OUT):
    for values in journal.of(kind):
      observe((kind, values['step']), values)


def batches_of(
  training: training_lib.Training, examples: list[batches_lib.Example]
) -> batches_lib.Batches:
  """The batches of an endless run.

  Raises:
    ValueError: none of the examples is short enough.
  """
  return batches_lib.Batches(
    examples=examples,
    batch_size=training.batch_size,
    max_length=training.max_length,
    width_multiple=training.width_multiple,
    seed=training.seed,
  )


def seen(reports: Iterable[Mapping[str, Any]]) -> dict[int, int]:
  """Tokens of answers seen by each step that has a report."""
  found: dict[int, int] = {}
  total = 0
  for report in reports:
    total += report['answer_tokens']
    found[report['step']] = total
  return found


def _check(report, step):
  if not report['is_finite']:
    raise LossError(
      f'step {step} cannot be taken: the loss is {float(report["loss"])}, the '
      f'gradient {float(report["gradient_norm"])} long, the update no number'
    )
