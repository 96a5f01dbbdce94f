"""Checks of single settings, shared by several modules."""

from collections.abc import Sequence
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


def count(name: str, value: Any, least: int = 1) -> None:
  """Raises ValueError unless a setting is an integer of at least `least`."""
  is_one = is_count(value, least)
  _require(name, value, is_one, f'an integer of at least {least}')


def share(name: str, value: float) -> None:
  """Raises ValueError unless a setting is a number from 0 to 1."""
  if not 0 <= value <= 1:
    raise ValueError(f'{name} is {value}: give a number from 0 to 1')


def counts(settings: Any, names: Sequence[str], least: int = 1) -> None:
  """Checks each of these fields of a configuration as `count` does."""
  for name in names:
    count(_full(settings, name), getattr(settings, name), least)


def shares(settings: Any, names: Sequence[str]) -> None:
  """Checks each of these fields of a configuration as `share` does."""
  for name in names:
    share(_full(settings, name), getattr(settings, name))


def field(settings: Any, name: str, holds: bool, expected: str) -> None:
  """Raises ValueError, naming a field and what to give, unless `holds`."""
  _require(_full(settings, name), getattr(settings, name), holds, expected)


def _full(settings, name):
  """Returns a field's name as configurations write it: Training.decay."""
  return f'{type(settings).__name__}.{name}'


def _require(name, value, holds, expected):
  if not holds:
    raise ValueError(f'{name} is {value!r}: give {expected}')


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
