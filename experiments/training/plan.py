"""The length of a run and its learning rate: warmup, constant, decay.

The rate rises linearly, stays constant, and falls towards 0 over the last
steps, a tenth of all by default (Hägele et al., 2405.18392). Up to the decay
nothing depends on the length of the run, so that a run can be made longer: it
then continues from where the decay began, and drops the steps of the decay.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Plan:
  """The step at which the decay begins, and the last step."""

  decay_start: int
  num_steps: int

  @classmethod
  def of(
    cls, *, steps: float, unit: int, decay: float, taken: int, stop: int | None
  ) -> 'Plan':
    """Plans a run of about `steps` steps.

    Args:
      steps: the number of steps wanted, including the decay.
      unit: both steps of the plan are multiples of it.
      decay: the decay's share of the steps, above 0 and below 1.
      taken: steps that have been taken at the full rate. The decay begins
        after them even if that makes the run longer than wanted.
      stop: the step at which the decay begins at the latest, unless more have
        been taken already; None for no such limit.
    """
    start = max(1, round(steps * (1 - decay) / unit)) * unit
    if stop is not None:
      start = min(start, stop)
    start = max(start, taken)
    # Depends on the start alone, so that equal starts have equal ends.
    fall = max(1, round(start * decay / (1 - decay) / unit)) * unit
    return cls(start, start + fall)

  def scale(self, step: int, warmup: int, first: int = 0) -> float:
    """Returns the share of the peak rate at a step; the first step is 0.

    Args:
      step: the step.
      warmup: the number of steps over which the rate rises.
      first: the rate is 0 before this step.
    """
    if step < first:
      return 0.0
    rise = min(1.0, (step - first + 1) / warmup) if warmup else 1.0
    if step < self.decay_start:
      return rise
    # The first step of the decay is already below the full rate, and the last
    # one is still above 0.
    length = self.num_steps - self.decay_start + 1
    done = (step - self.decay_start + 1) / length
    return rise * (1 - math.sqrt(done))
