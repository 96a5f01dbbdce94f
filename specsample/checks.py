"""Checks of single settings, shared by several modules."""

import operator
from typing import Any

from specsample.types import Drafter


def is_count(value: Any, least: int = 1) -> bool:
  """Returns whether a value is an integer of at least `least`; 2.0 is not."""
  try:
    return operator.index(value) >= least
  except TypeError:
    return False


def is_drafter(name: str, value: Any) -> None:
  """Raises ValueError unless an argument of that name is a drafter."""
  if isinstance(value, Drafter):
    new = type(value).observe is not Drafter.observe
    if new or not (hasattr(value, 'extend') or hasattr(value, 'update')):
      return
  elif not isinstance(value, type) and not hasattr(value, 'propose'):
    raise ValueError(
      f'{name} is {value!r}: give a drafter, such as drafters.NoDraft()'
    )
  if isinstance(value, type):
    raise ValueError(
      f'{name} is the class {value.__name__}: give an instance, such as '
      f'{value.__name__}(...)'
    )
  raise ValueError(
    f'{name} is {type(value).__name__}, which has extend and update or does '
    'not derive from specsample.types.Drafter: derive it from that class and '
    'write observe for both, as CHANGELOG.md says'
  )


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
