"""Checks of single settings that several parts make."""

import operator
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
  """Whether a value is an integer of at least `least`: 2.0 is none."""
  try:
    return operator.index(value) >= least
  except TypeError:
    return False
