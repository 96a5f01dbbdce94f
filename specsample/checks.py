"""Checks of single settings, shared by several modules."""

import operator
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
  """Returns whether a value is an integer of at least `least`; 2.0 is not."""
  try:
    return operator.index(value) >= least
  except TypeError:
    return False
