"""Checkpoints of a training run; the last complete one is restored."""

from collections.abc import Collection
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.command import cli
from experiments.command import distributed
from specsample import files
from specsample.training.step import TrainState


class Checkpoints:
  """The last two states of a run, and those that `save` was told to keep.

  A half-written state does not count. Several processes all call each method,
  with a folder that all can reach.
  """

  def __init__(self, folder: pathlib.PurePath):
    """Opens the folder, or creates it."""
    self._folder = files.absolute(folder)
    is_remote = files.is_remote(self._folder)
    # orbax deletes a killed run's leftovers in a thread that outlives `close`
    # and complains if the program ends first. So they are deleted here, except
    # in buckets, where orbax marks them differently.
    if not is_remote and distributed.is_first():
      for unfinished in self._folder.glob('*.orbax-checkpoint-tmp*'):
        unfinished.rmtree()
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=is_remote,
        enable_async_checkpointing=False,
      ),
    )

  def restore(self, like: TrainState, step: int) -> TrainState:
    """Reads the state of a step, of the shapes and shardings of `like`."""
    shape = lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding
    )
    shapes = ocp.args.StandardRestore(jax.tree.map(shape, like))
    return self._read(step, state=shapes)

  def history(self, step: int) -> dict[str, Any]:
    """Reads what was saved beside a state."""
    return self._read(step, history=ocp.args.JsonRestore())

  def _read(self, step, **item):
    (name,) = item
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**item))[name]
    except Exception as error:  # orbax raises it if an array is damaged.
      reason, *_ = str(error).splitlines() or [type(error).__name__]
      raise ValueError(
        f'{self._folder / str(step)} is damaged, or belongs to another run '
        f'({reason}): delete it to continue from the checkpoint before it, or '
        'give another --out'
      ) from error

  def save(
    self,
    state: TrainState,
    history: dict[str, Any] | None = None,
    keep: Collection[int] = (),
  ) -> None:
    """Keeps a state and a history, JSON, in place of those of the same step.

    Returns when they are on the disk. `keep` has the steps of the states to
    keep besides the last two.
    """
    step = int(state.step)
    try:
      if step in self.steps:
        self._manager.delete(step)
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          history=ocp.args.JsonSave(history or {}),
        ),
      )
    except (OSError, ValueError) as error:
      raise cli.NotWrittenError(
        f'the checkpoint of step {step} cannot be written to {self._folder} '
        f'({error}); {self.last}: make room, then run the same command again '
        'to continue'
      ) from error
    for other in self.steps[:-2]:
      if other not in keep:
        self._manager.delete(other)

  def drop_after(self, step: int) -> None:
    """Deletes the states of later steps."""
    for other in self.steps:
      if other > step:
        self._manager.delete(other)

  @property
  def steps(self) -> list[int]:
    """The steps of the states that are kept, ascending."""
    return sorted(self._manager.all_steps())

  @property
  def step(self) -> int | None:
    """The step of the last state that is kept, None if there is none."""
    return self._manager.latest_step()

  @property
  def last(self) -> str:
    """The state that a run would continue from, in words."""
    step = self.step
    return 'none is kept' if step is None else f'the one of step {step} is kept'

  def close(self) -> None:
    """Ends orbax's threads, which complain if they outlive the program."""
    self._manager.close()
