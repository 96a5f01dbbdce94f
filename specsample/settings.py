"""Settings that are checked when they are made.

A field's type names the rule that its value must follow:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Budget(settings.Settings):
      patience: settings.Count = 8
      decay: settings.Share = 0.98
      order: Annotated[str, settings.one_of('depth', 'width')] = 'depth'
      room: settings.Count | None = None

`Budget(decay=2)` raises 'Budget.decay is 2: give a number from 0 to 1'.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import operator
import typing
from typing import Annotated, Any, TYPE_CHECKING

# A rule raises ValueError unless a value, called by this name, follows it.
Rule = Callable[[str, Any], None]


class Settings:
  """A base of dataclasses whose fields are checked when they are made.

  A rule that concerns several fields belongs in `_check`. Lists become tuples,
  because settings are often static, and so must be hashable.
  """

  def __post_init__(self) -> None:
    annotations = _annotations(type(self))  # type: ignore[arg-type]
    for field in dataclasses.fields(self):  # type: ignore[arg-type]
      value = vars(self)[field.name]
      if isinstance(value, (list, range)):
        value = tuple(value)
        object.__setattr__(self, field.name, value)
      for rule in _rules(annotations[field.name], value):
        rule(f'{type(self).__name__}.{field.name}', value)
    self._check()

  def _check(self) -> None:
    """Raises ValueError unless the settings fit each other."""


# `default` declares a property that a field of a subclass's dataclass may
# replace. A real property would be taken for the field's default value.
if TYPE_CHECKING:
  default = property
else:

  class default:  # noqa: N801
    def __init__(self, get):
      self._get, self.__doc__ = get, get.__doc__

    def __set_name__(self, owner, name):
      self._name = name

    def __get__(self, instance, owner):
      if instance is None:
        raise AttributeError(f'{owner.__name__} has no attribute {self._name}')
      return self._get(instance)


@functools.cache
def _annotations(cls):
  # `from __future__ import annotations` leaves strings in `Field.type`.
  try:
    return typing.get_type_hints(cls, include_extras=True)
  except NameError:  # a type that is imported for type checkers alone
    return {field.name: field.type for field in dataclasses.fields(cls)}


def _rules(annotation, value):
  """Returns the rules of a field's type; of `X | None` those of X, or none."""
  if typing.get_origin(annotation) is Annotated:
    return typing.get_args(annotation)[1:]
  if typing.get_origin(annotation) is not typing.Union or value is None:
    return ()
  options = typing.get_args(annotation)
  return [rule for option in options for rule in _rules(option, value)]


def rule(holds: Callable[[Any], bool], expected: str) -> Rule:
  """Returns the rule that `holds` is true; `expected` says what to give."""

  def check(name, value):
    try:
      is_fine = holds(value)
    except TypeError:  # of another type altogether
      is_fine = False
    if not is_fine:
      raise ValueError(f'{name} is {value!r}: give {expected}')

  return check


def is_count(value: Any, least: int = 1) -> bool:
  """Returns whether a value is an integer >= `least`; 2.0 and True are not."""
  try:
    return not isinstance(value, bool) and operator.index(value) >= least
  except TypeError:
    return False


def at_least(least: int) -> Rule:
  """Returns the rule for integers of at least `least`."""
  return rule(lambda x: is_count(x, least), f'an integer of at least {least}')


def between(least: float, most: float) -> Rule:
  """Returns the rule for numbers from `least` to `most`."""
  return rule(
    lambda x: bool(least <= x <= most), f'a number from {least:g} to {most:g}'
  )


def one_of(*options: Any) -> Rule:
  """Returns the rule for values that are one of the options."""
  shown = ', '.join(map(repr, options))
  several = 'one of ' if len(options) > 1 else ''
  return rule(lambda x: x in options, several + shown)


Count = Annotated[int, at_least(1)]
Share = Annotated[float, between(0, 1)]
Positive = Annotated[
  float, rule(lambda x: 0 < x < math.inf, 'a number above 0')
]
NotNegative = Annotated[
  float, rule(lambda x: 0 <= x < math.inf, 'a number of at least 0')
]
Flag = Annotated[bool, rule(lambda x: isinstance(x, bool), 'True or False')]
