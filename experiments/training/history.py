"""What a run has measured so far; each checkpoint holds it beside the state.

So a run that was killed, or that is made longer, goes on with the measurements
up to its checkpoint, and takes those of later steps again.
"""

import dataclasses
import json
import time
from typing import Any

from etils import epath

from experiments.command import distributed
from experiments.command import environment
from experiments.reporting import files
from experiments.training import schedule
from experiments.training import train_state

TRAIN, HELD_OUT = 'train', 'held out'
Values = dict[str, Any]  # JSON


@dataclasses.dataclass(kw_only=True)
class History:
  """The measurements of a run, in order of their steps.

  Attributes:
    run: a digest of the configuration and the data.
    plan: of the run.
    segments: the parts of the run, one for each start of the command.
    train: the means over the steps of each report.
    held_out: the evaluations.
  """

  run: str
  plan: schedule.Plan
  segments: list[Values] = dataclasses.field(default_factory=list)
  train: list[Values] = dataclasses.field(default_factory=list)
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

  Args:
    checkpoints: those of the run.
    run: as in `History`.
    steps, unit, decay: as in `schedule.plan`.
  """
  last = checkpoints.step
  if last is None:
    plan = schedule.plan(steps, unit=unit, decay=decay)
    return 0, History(run=run, plan=plan)
  found = _read(checkpoints, last)
  if found.run != run:
    raise ValueError(
      f'the checkpoint of step {last} belongs to another run: delete the '
      'folders checkpoints and drafter too, or give another --out'
    )
  taken = min(last, found.plan.decay_start)
  plan = schedule.plan(steps, unit=unit, decay=decay, taken=taken)
  if plan != found.plan and last > taken:  # the old decay is dropped
    last, found = taken, _read(checkpoints, taken)
  return last, dataclasses.replace(found, plan=plan)


def _read(checkpoints: train_state.Checkpoints, step: int) -> History:
  values = checkpoints.history(step)
  plan = schedule.Plan(*values.pop('plan'))
  return History(plan=plan, **values)
