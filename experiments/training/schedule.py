"""The length of a run and its learning rate: warm-up, constant, decay.

The rate rises linearly, stays constant, and falls towards 0 over the last
steps, a tenth of all by default (Hägele et al., 2405.18392). Up to the decay
nothing depends on the length of the run, so that a run can be made longer: it
then continues from where the decay began, and drops the steps of the decay.
"""

from typing import NamedTuple

import jax.numpy as jnp
import optax


class Plan(NamedTuple):
  """The step at which the decay begins, and the last step."""

  decay_start: int
  num_steps: int


def plan(steps: float, *, unit: int, decay: float, taken: int = 0) -> Plan:
  """Plans a run of about `steps` steps.

  Args:
    steps: the number of steps wanted, including the decay.
    unit: both steps of the plan are multiples of it.
    decay: the decay's share of the steps, above 0 and below 1.
    taken: steps that have been taken at the full rate. The decay begins after
      them even if that makes the run longer than wanted.
  """
  start = max(taken, max(1, round(steps * (1 - decay) / unit)) * unit)
  # Depends on the start alone, so that equal starts have equal ends.
  fall = max(1, round(start * decay / (1 - decay) / unit)) * unit
  return Plan(start, start + fall)


def rate(
  peak: float, plan: Plan, warmup: int, first: int = 0
) -> optax.Schedule:
  """Returns the learning rate as a function of the step; the first step is 0.

  Args:
    peak: the constant rate.
    plan: of the run.
    warmup: the number of steps over which the rate rises.
    first: the rate is 0 before this step.
  """
  decay_start, num_steps = plan

  def schedule(step):
    rise = jnp.clip((step - first + 1) / max(warmup, 1), 0, 1)
    # The first step of the decay is already below the full rate, and the last
    # one is still above 0.
    fall = (step - decay_start + 1) / (num_steps - decay_start + 1)
    return peak * rise * (1 - jnp.sqrt(jnp.clip(fall, 0, 1)))

  return schedule
