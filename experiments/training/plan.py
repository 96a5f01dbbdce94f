"""How long a run is and how its learning rate goes: warmup, constant, decay.

The rate rises linearly, stays, and falls to 0 over the last tenth of the steps
(Hägele et al., 2405.18392). Up to the decay nothing depends on how long the
run is, so that it can be made longer: it then goes on from where the decay
began, and the steps of the decay are not a part of it.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where the decay begins, and the last step."""

  decay_start: int
  num_steps: int

  @classmethod
  def of(
    cls, *, steps: float, unit: int, decay: float, taken: int, stop: int | None
  ) -> 'Plan':
    """Plans a run of about so many steps.

    Args:
      steps: wanted, the decay's included.
      unit: both numbers are multiples of it.
      decay: the decay's share of the steps, above 0 and below 1.
      taken: steps that have been taken at the full rate. The decay begins
        after them even if that makes the run longer than wanted.
      stop: the step at which the decay begins unless more are taken already;
        None for where `steps` says.
    """
    start = max(1, round(steps * (1 - decay) / unit)) * unit
    if stop is not None:
      start = min(start, stop)
    start = max(start, taken)
    # Follows from the start alone, so that the same start has the same end.
    fall = max(1, round(start * decay / (1 - decay) / unit)) * unit
    return cls(start, start + fall)

  def scale(self, step: int, warmup: int, first: int = 0) -> float:
    """The share of the peak rate with which a step is taken, step 0 the first.

    Args:
      step: which.
      warmup: steps in which the rate rises.
      first: before this step it is 0.
    """
    if step < first:
      return 0.0
    rise = min(1.0, (step - first + 1) / warmup) if warmup else 1.0
    if step < self.decay_start:
      return rise
    # The first step of the decay has less than the full rate, and the last one
    # more than none.
    length = self.num_steps - self.decay_start + 1
    done = (step - self.decay_start + 1) / length
    return rise * (1 - math.sqrt(done))
