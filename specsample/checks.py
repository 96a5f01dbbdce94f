"""Checks of single settings, shared by several modules."""

import operator
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
  """Returns whether a value is an integer of at least `least`; 2.0 is not."""
  try:
    return operator.index(value) >= least
  except TypeError:
    return False


def draft_kinds(verify: Any) -> None:
  """Refuses a verifier that declares its draft kinds by their old name.

  Raises:
    ValueError: it has `draft_laws`, but no `draft_kinds`.
  """
  if hasattr(verify, 'draft_laws') and not hasattr(verify, 'draft_kinds'):
    raise ValueError(
      f'{type(verify).__name__} declares draft_laws, which is now draft_kinds: '
      'rename the attribute'
    )
