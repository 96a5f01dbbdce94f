"""The widths of passes that are worth compiling, and the one that pays most."""

from collections.abc import Sequence
import math

import jax.numpy as jnp
import numpy as np

from specsample.types import Array

# A narrower pass is compiled if it makes a round cheaper by this share.
_LEAST_GAIN = 0.05


def check_costs(
  costs: Sequence[float], num_draft_tokens: int = 1
) -> tuple[float, ...]:
  """Returns the checked costs of rounds of 0, 1, ... draft tokens."""
  costs = tuple(float(cost) for cost in costs)
  if len(costs) < 2 or not all(0 < cost < math.inf for cost in costs):
    raise ValueError(
      f'costs are {costs}: give the cost of a round with 0 draft tokens, with '
      '1, and so on, each above 0'
    )
  if len(costs) <= num_draft_tokens:
    raise ValueError(
      f'costs has {len(costs)} numbers, but rounds have up to '
      f'{num_draft_tokens} draft tokens: give {num_draft_tokens + 1} costs'
    )
  return costs


def ladder(costs: Sequence[float], most: int) -> tuple[int, ...]:
  """Returns the draft lengths that are worth a pass of their own: 0, ..., most.

  Args:
    costs: of rounds of 0, 1, ... draft tokens; empty if they are not known.
    most: the most draft tokens of a round.
  """
  widths = [most]
  if most < len(costs):
    for width in range(most - 1, 0, -1):
      if costs[width] < (1 - _LEAST_GAIN) * costs[widths[-1]]:
        widths.append(width)
  return tuple(sorted({0, *widths}))


def best(
  chance: Array, is_live: Array, costs: Sequence[float], widths: Sequence[int]
) -> Array:
  """Returns the width [] int32 at which a batch emits the most for its cost.

  Args:
    chance: [B, K] float32, the probability that each draft token is kept once
      it is reached.
    is_live: [B] bool; the other rows emit nothing.
    costs: [K + 1] of a round of the whole batch with 0, ..., K draft tokens per
      row.
    widths: the widths to choose from, rising.
  """
  kept = jnp.cumsum(jnp.cumprod(chance, axis=-1), axis=-1)
  tokens = 1 + jnp.pad(kept, ((0, 0), (1, 0)))
  emitted = jnp.sum(jnp.where(is_live[:, None], tokens, 0), axis=0)
  choices = np.asarray(widths, np.int32)
  promised = emitted[choices] / np.asarray(costs, np.float32)[choices]
  return jnp.asarray(choices)[jnp.argmax(promised)]
