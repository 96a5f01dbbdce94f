"""The states that a training run keeps.

`checkpoints` holds the last two states at the full learning rate; a run that is
made longer continues from them. A decay over steps A to B has its own in
`decay/A-B/checkpoints`. The weights with the most tokens per round are in
`best` and `decay/A-B/best`.
"""

import dataclasses

from etils import epath
import numpy as np

from experiments.command import distributed
from experiments.training import plan as plan_lib
from experiments.training import records as records_lib
from experiments.training import train_state
from specsample import files
from specsample.training.step import TrainState

_CHECKPOINTS, _BEST, _DECAY = 'checkpoints', 'best', 'decay'


class RunCheckpoints:
  """The states of a run, found and kept according to its plan."""

  def __init__(self, out: epath.Path, records: records_lib.Records):
    """Opens the folders in `out`, or creates them."""
    self._out = out
    self._records = records
    self._opened: dict[epath.Path, train_state.Checkpoints] = {}

  def close(self) -> None:
    """Closes all folders; this must be the last call."""
    for opened in self._opened.values():
      opened.close()

  def step(self, plan: plan_lib.Plan) -> int:
    """Returns the step that the run continues from, 0 if no state was kept."""
    constant = self._open(_CHECKPOINTS).step or 0
    step = constant
    if constant == plan.decay_start and self._has_decay(plan):
      step = self._of_decay(plan, _CHECKPOINTS).step or constant
    if step and self._records.get(plan, records_lib.TRAIN, step) is None:
      train_state.refuse_step(step, 'drafter')
    return step

  def restore(self, like: TrainState, plan: plan_lib.Plan) -> TrainState | None:
    """Reads the state of `step`; returns None if no state was kept."""
    step = self.step(plan)
    return self._at(plan, step, _CHECKPOINTS).restore(like) if step else None

  def save(self, state: TrainState, plan: plan_lib.Plan) -> None:
    """Keeps a state, in the plan's own folder if it is one of the decay."""
    self._at(plan, int(state.step), _CHECKPOINTS).save(state)

  def forget_other_decays(self, plan: plan_lib.Plan) -> None:
    """Deletes the states of decays that are no longer part of the run."""
    parent = self._out / _DECAY
    if distributed.is_first() and files.is_folder(parent):
      for folder in parent.iterdir():
        if folder.name != self._decay(plan).name:
          folder.rmtree()

  def best(self, plan: plan_lib.Plan) -> dict | None:
    """Returns the evaluation of the best weights, None if none are kept."""
    kept = [*self._open(_BEST).steps]
    kept = [step for step in kept if step <= plan.decay_start]
    if self._has_decay(plan):
      kept += self._of_decay(plan, _BEST).steps
    get = self._records.get
    found = [get(plan, records_lib.HELD_OUT, step) for step in kept]
    known = [values for values in found if values is not None]
    return max(known, key=lambda x: x['tokens_per_round'], default=None)

  def save_best(self, state: TrainState, plan: plan_lib.Plan) -> None:
    """Keeps the weights of a state as the best so far.

    This comes before they are journalled: weights without a record in the
    journal are not known to be any good, and `best` ignores them.
    """
    weights = dataclasses.replace(state, optimizer=())
    self._at(plan, int(state.step), _BEST).save(weights)

  def restore_best(self, like: TrainState, plan: plan_lib.Plan) -> TrainState:
    """Reads the weights that `best` describes."""
    best = self.best(plan)
    if best is None:
      raise ValueError(
        f'{self._out / _BEST} and {self._decay(plan)} hold no weights that the '
        'journal knows: restore them, or give another --out'
      )
    step = best['step']
    like = dataclasses.replace(like, optimizer=())
    found = self._at(plan, step, _BEST).restore(like, step)
    assert found is not None
    return found

  def last(self, plan: plan_lib.Plan) -> str:
    """Returns which state the run would continue from, in words."""
    step = self.step(plan)
    return f'the one of step {step} is kept' if step else 'none is kept'

  def _at(self, plan, step, kind):
    if step <= plan.decay_start:
      return self._open(kind)
    return self._of_decay(plan, kind)

  def _of_decay(self, plan, kind):
    return self._open(_DECAY, self._decay(plan).name, kind)

  def _decay(self, plan):
    return self._out / _DECAY / f'{plan.decay_start}-{plan.num_steps}'

  def _has_decay(self, plan):
    exists = np.asarray([self._decay(plan).exists()])
    return distributed.from_first(exists)[0]

  def _open(self, *names):
    folder = self._out.joinpath(*names)
    if folder not in self._opened:
      self._opened[folder] = train_state.Checkpoints(folder)
    return self._opened[folder]
