"""Values of a model's configuration, as foreign formats store them."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

# More layers than any model has. A model is built layer by layer, some 10 ms
# each, so a damaged count would take hours and all memory.
_MOST_LAYERS = 1000


# How messages call the type of a value, and how values are told to have it.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
  int: ('an integer', lambda x: type(x) is int),
  float: ('a number', lambda x: type(x) in (int, float)),
  bool: ('true or false', lambda x: type(x) is bool),
  str: ('a string', lambda x: isinstance(x, str)),
  dict: ('an object', lambda x: isinstance(x, dict)),
  list[int]: ('a list of integers', lambda x: _is_list(x, int)),
  list[str]: ('a list of strings', lambda x: _is_list(x, str)),
}


def _is_list(value, kind):
  return isinstance(value, list) and all(type(x) is kind for x in value)


# A null at these keys takes the part away whatever the default is.
_NULL_IS_NONE = {
  'attn_logit_softcapping',
  'final_logit_softcapping',
  'sliding_window',
  'q_lora_rank',
  'num_key_value_heads',
}
# A null at these keys means that the default applies.
_NULL_IS_ABSENT = {'head_dim', 'rope_parameters', 'max_position_embeddings'}


def dtype_name(dtype: DTypeLike) -> str:
  """Returns the name of a dtype such as 'bfloat16' or jnp.bfloat16."""
  try:
    name = jnp.dtype(dtype).name
  except (TypeError, ValueError):
    name = None
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype is {dtype!r}: give 'float32' or 'bfloat16'")
  return name


@dataclasses.dataclass(frozen=True)
class Config:
  """Configuration values by name, checked when they are read.

  Methods raise ValueError if a value is not as expected. A null value counts as
  missing.
  """

  values: Mapping[str, Any]
  origin: str  # the file, for messages

  def get(self, key: str, kind: Any, default: Any = None) -> Any:
    """Returns a value of a type such as int, float (any number) or list[str].

    If it is missing, that is the default.
    """
    value = self.values.get(key)
    if value is None:
      return default
    expected, is_right = _KINDS[kind]
    if not is_right(value):
      raise self.unexpected(key, expected)
    return value

  def has(self, key: str) -> bool:
    """Returns whether there is a value, null among them."""
    return key in self.values

  def changed(self, values: Mapping[str, Any]) -> 'Config':
    """Returns the configuration with other values at some keys."""
    return Config({**self.values, **values}, self.origin)

  def filled(self, defaults: Mapping[str, Any]) -> 'Config':
    """Returns the configuration with defaults for the keys that are absent."""
    given = {
      key: value
      for key, value in self.values.items()
      if value is not None or key not in _NULL_IS_ABSENT
    }
    for key in defaults.keys() - _NULL_IS_NONE:
      if key in given and given[key] is None:
        raise self.unexpected(key, 'a value, or no such key')
    return Config({**defaults, **given}, self.origin)

  def of_one(self, kind: Any, *keys: str) -> Any:
    """Returns the value of keys that mean the same; see `get` and `agreed`."""
    return self.agreed({key: self.get(key, kind) for key in keys})

  def agreed(self, values: Mapping[str, Any]) -> Any:
    """Returns the one of values of the same meaning, None if all are None."""
    given = {key: x for key, x in values.items() if x is not None}
    first = next(iter(given.values()), None)
    if any(x != first for x in given.values()):
      listed = ' and '.join(f'{key} is {x!r}' for key, x in given.items())
      raise ValueError(
        f'{self.origin}: {listed}, which mean the same: remove what is wrong'
      )
    return first

  def size(self, key: str, default: int | None = None) -> int:
    """Returns an integer of at least 1."""
    value = self.get(key, int, default)
    if value is None or value < 1:
      raise self.unexpected(key, 'an integer of at least 1')
    return value

  def size_of_one(self, *keys: str, default: int | None = None) -> int:
    """Returns an integer of at least 1 at one of keys that mean the same."""
    found = self.of_one(int, *keys)
    given = next(
      (key for key in keys if self.values.get(key) == found), keys[0]
    )
    return self.size(given, default)

  def layers(self, key: str, most: int = _MOST_LAYERS) -> int:
    """Returns a number of layers, an integer from 1 to `most`."""
    value = self.size(key)
    if value > most:
      raise self.unexpected(key, f'an integer from 1 to {most}')
    return value

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a finite number above 0."""
    value = self.get(key, float, default)
    if value is None or not 0 < value < math.inf:
      raise self.unexpected(key, 'a number above 0')
    return float(value)

  def optional_size(self, key: str) -> int | None:
    """Returns an integer of at least 1, or None if it is missing."""
    return None if self.values.get(key) is None else self.size(key)

  def optional_number(self, key: str) -> float | None:
    """Returns a number above 0, or None if it is missing."""
    return None if self.values.get(key) is None else self.number(key)

  def flag(self, key: str, default: bool = False) -> bool:
    """Returns true or false."""
    return self.get(key, bool, default)

  def only(self, key: str, supported: Any) -> None:
    """Raises ValueError unless the value is missing or the supported one."""
    kind = float if type(supported) is int else type(supported)
    value = self.values.get(key)
    if supported is not None:
      value = self.get(key, kind, supported)
    if value != supported:
      raise ValueError(
        f'{self.origin}: {key} is {value!r}, but only {supported!r} is '
        'supported: give a checkpoint with that setting'
      )

  def part(self, key: str) -> 'Config':
    """Returns the object at a key, empty if it is missing."""
    return Config(self.get(key, dict, {}), self.origin)

  def unexpected(self, key: str, expected: str) -> ValueError:
    """Returns the error for a value that is not what was expected."""
    return ValueError(
      f'{self.origin}: {key} is {self.values.get(key)!r}, expected {expected}: '
      'the file is damaged, or is for another architecture'
    )
