"""What a run has measured so far; each checkpoint holds it beside the state.

So a run that was killed, or that is made longer, goes on with the measurements
up to its checkpoint, and takes those of later steps again.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import time
from typing import Any

from etils import epath

from experiments.command import distributed
from experiments.command import environment
from experiments.reporting import files
from experiments.training import train_state
from experiments.training import training as training_lib
from specsample import files as library_files

TRAIN, HELD_OUT = 'train', 'held out'
Values = dict[str, Any]  # JSON
# observe(kind, values) is called for each report and evaluation of a step.
Observe = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(kw_only=True)
class History:
  """The measurements of a run, in order of their steps."""

  run: str  # a digest of the configuration and the data
  plan: training_lib.Plan
  # The parts of the run, one for each start of the command.
  segments: list[Values] = dataclasses.field(default_factory=list)
  # The means over the steps of each report.
  train: list[Values] = dataclasses.field(default_factory=list)
  # The evaluations.
  held_out: list[Values] = dataclasses.field(default_factory=list)

  @property
  def best(self) -> Values | None:
    """The first evaluation with the most tokens per round."""
    return _best(self.held_out)

  def kept(self) -> set[int]:
    """Returns the steps whose checkpoints the run may need again.

    These are the best one, and those from which a longer run goes on.
    """
    start = self.plan.decay_start
    constant = [x for x in self.held_out if x['step'] <= start]
    found = [x['step'] for x in map(_best, (self.held_out, constant)) if x]
    return {start, *found}

  def seen(self) -> dict[int, int]:
    """Returns the answer tokens seen up to each report, by step."""
    found, total = {}, 0
    for report in self.train:
      total += report['answer_tokens']
      found[report['step']] = total
    return found

  def begin_segment(self, step: int) -> None:
    """Notes the code and the machine of the run from a step on."""
    self.segments.append(
      {
        'first_step': step,
        'begun': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
        'code': environment.source(),
        **environment.describe(),
      }
    )

  def write(self, path: epath.Path) -> None:
    """Writes the measurements as JSON lines, for people to read."""
    lines = [
      json.dumps({'kind': kind} | values)
      for kind, found in (
        ('segment', self.segments),
        (TRAIN, self.train),
        (HELD_OUT, self.held_out),
      )
      for values in found
    ]
    if distributed.is_first():
      files.write(path, ''.join(f'{line}\n' for line in lines).encode())


def _best(evaluations: list[Values]) -> Values | None:
  return max(evaluations, key=lambda x: x['tokens_per_round'], default=None)


def resume(
  checkpoints: train_state.Checkpoints,
  run: str,
  *,
  steps: float,
  unit: int,
  decay: float,
) -> tuple[int, History]:
  """Returns the step to continue from, and the history up to it.

  `run` is as in `History`; `steps`, `unit` and `decay` as in `training.plan`.
  """
  last = checkpoints.step
  if last is None:
    plan = training_lib.plan(steps, unit=unit, decay=decay)
    return 0, History(run=run, plan=plan)
  found = _read(checkpoints, last)
  if found.run != run:
    raise ValueError(
      f'the checkpoint of step {last} belongs to another run: delete the '
      'folders checkpoints and drafter too, or give another --out'
    )
  taken = min(last, found.plan.decay_start)
  plan = training_lib.plan(steps, unit=unit, decay=decay, taken=taken)
  if plan != found.plan and last > taken:  # the old decay is dropped
    last, found = taken, _read(checkpoints, taken)
  return last, dataclasses.replace(found, plan=plan)


def _read(checkpoints: train_state.Checkpoints, step: int) -> History:
  values = checkpoints.history(step)
  plan = training_lib.Plan(*values.pop('plan'))
  return History(plan=plan, **values)


def check_tensorboard(folder: pathlib.PurePath) -> None:
  """Refuses a folder that `tensorboard` cannot write to."""
  if importlib.util.find_spec('tensorboardX') is None:
    raise ValueError(
      '--tensorboard needs the package tensorboardX: pip install '
      "'specsample[tensorboard]', or leave the flag out"
    )
  if library_files.is_remote(folder):
    raise ValueError(
      f'--tensorboard writes to a local folder, but {folder} is in a bucket: '
      'give another --out, or leave the flag out'
    )


@contextlib.contextmanager
def tensorboard(folder: pathlib.PurePath) -> Iterator[Observe]:
  """Writes event files to a local folder while the context lasts.

  The package tensorboardX writes them, without TensorFlow. `tensorboard
  --logdir=FOLDER` shows them, even while the run goes on.
  """
  check_tensorboard(folder)
  import tensorboardX  # noqa: PLC0415 (an extra, which most runs do without)

  # Hides what earlier starts wrote: a kill may have lost the last events.
  with tensorboardX.SummaryWriter(
    str(folder), flush_secs=10, purge_step=0
  ) as events:

    def observe(kind, values):
      for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        for i, number in enumerate(numbers, 1):
          if number is not None:
            tag = f'{kind}/{name}' + (f'/{i}' if value is numbers else '')
            events.add_scalar(tag.replace(' ', '_'), number, values['step'])

    yield observe
