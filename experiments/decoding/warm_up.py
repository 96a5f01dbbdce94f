"""A warm-up of all that a round may run, so that nothing is slow later."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample.types import DecodeState


def run(
  begin: Callable[[list[list[int]]], DecodeState],
  advance: Callable[[DecodeState], Any],
  prompts: Sequence[list[int]],
  widths: Sequence[int],
) -> None:
  """Runs a round of each width.

  XLA builds parts of a program when they first run, which takes a quarter of a
  second for a pass of SmolLM2 on two cores. Every drafter drafts for prompts
  that repeat one token, and a row with little room left has few drafts.

  Args:
    begin: prefills prompts.
    advance: runs a round, and whatever else is to be warmed up.
    prompts: token ids of each row; only their lengths matter.
    widths: numbers of drafts for which there is a pass, as in `step.widths`.
  """
  repeated = [row[-1:] * len(row) for row in prompts]
  for width in widths:
    state = begin(repeated)
    limit = jnp.minimum(state.limit, state.length + width + 1)
    jax.block_until_ready(advance(dataclasses.replace(state, limit=limit)))
