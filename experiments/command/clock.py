"""How long a call takes, and its share for each of several rows."""

from collections.abc import Callable, Sequence
import time
from typing import Any

import jax


def seconds(function: Callable[..., Any], *args, **kwargs) -> tuple[Any, float]:
  """Calls the function; its result, ready, and the seconds that took."""
  start = time.perf_counter()
  result = jax.block_until_ready(function(*args, **kwargs))
  return result, time.perf_counter() - start


def by_tokens(total: float, lengths: Sequence[int]) -> list[float]:
  """The seconds of rows that were decoded at once, shared by their tokens."""
  tokens = sum(lengths)
  if not tokens:
    return [total / len(lengths)] * len(lengths)
  return [total * length / tokens for length in lengths]
