"""Checkpoints of a training run; the last complete one is restored."""

import pathlib
from typing import NoReturn, Protocol, TypeVar

import jax
import orbax.checkpoint as ocp

from experiments.command import cli
from experiments.command import distributed
from specsample import files
from specsample.types import Array


def refuse_results(folder: pathlib.PurePath, where: str) -> None:
  """Refuses results of another run, which would pass for those of this run.

  A run writes its results after its last step, so any that exist before then
  belong to another run.

  Args:
    folder: the folder of the results.
    where: what this run has done so far; it continues 'this run'.
  """
  if files.is_folder(folder):
    raise ValueError(
      f'{folder} exists, but this run {where}, so the folder belongs to '
      'another run: delete it or move it away, or give another --out'
    )


def refuse_step(step: int, result: str) -> NoReturn:
  """Refuses a checkpoint whose step the journal does not know.

  Args:
    step: of the checkpoint.
    result: the name of the folder that such a run writes at its end.
  """
  raise ValueError(
    f'the checkpoint of step {step} belongs to a run that the journal does not '
    f'know: delete the folders checkpoints and {result} too, or give another '
    '--out'
  )


class Stepped(Protocol):
  """A state with a step, which is the name of its checkpoint's folder."""

  @property
  def step(self) -> Array:
    """[] int32, the steps taken."""


_State = TypeVar('_State', bound=Stepped)


class Checkpoints:
  """The last two states of a run; a half-written state does not count.

  Several processes all call each method, with a folder that all can reach.
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
        max_to_keep=2,
        cleanup_tmp_directories=is_remote,
        enable_async_checkpointing=False,
      ),
    )

  def restore(self, like: _State, step: int | None = None) -> _State | None:
    """Reads a state, sharded over the devices as `like` is.

    Args:
      like: a state of the same shapes.
      step: the step of the state; None for the last one.

    Returns:
      The state, or None if there is none yet.
    """
    step = self._manager.latest_step() if step is None else step
    if step is None:
      return None
    shape = lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=x.sharding
    )
    try:
      return self._manager.restore(
        step, args=ocp.args.StandardRestore(jax.tree.map(shape, like))
      )
    except Exception as error:  # orbax raises it if an array is damaged.
      reason, *_ = str(error).splitlines() or [type(error).__name__]
      raise ValueError(
        f'{self._folder / str(step)} is damaged, or belongs to another run '
        f'({reason}): delete it to continue from the checkpoint before it, or '
        'give another --out'
      ) from error

  def save(self, state: Stepped) -> None:
    """Keeps a state, in place of one of the same step.

    Returns when the state is on the disk.
    """
    step = int(state.step)
    try:
      if step in self._manager.all_steps():
        self._manager.delete(step)
      self._manager.save(step, args=ocp.args.StandardSave(state))
    except (OSError, ValueError) as error:
      raise cli.NotWrittenError(
        f'the checkpoint of step {step} cannot be written to {self._folder} '
        f'({error}); {self.last}: make room, then run the same command again '
        'to continue'
      ) from error

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
