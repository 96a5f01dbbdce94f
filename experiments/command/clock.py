"""Timing of calls, and the share of the time that each row takes."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax


def seconds(function: Callable[..., Any], *args, **kwargs) -> tuple[Any, float]:
  """Calls the function; returns its result, once ready, and the seconds."""
  start = time.perf_counter()
  result = jax.block_until_ready(function(*args, **kwargs))
  return result, time.perf_counter() - start


def by_tokens(total: float, lengths: Sequence[int]) -> list[float]:
  """Divides the seconds of rows that were decoded together by their tokens."""
  tokens = sum(lengths)
  if not tokens:
    return [total / len(lengths)] * len(lengths)
  return [total * length / tokens for length in lengths]
