"""Values of a model's configuration, as foreign formats store them."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

# More layers than any model has. A model is built layer by layer, some 10 ms
# each, so a damaged count would take hours and all memory.
MOST_LAYERS = 1000


def dtype_name(dtype: DTypeLike) -> str:
  """Returns the name of a dtype such as 'bfloat16' or jnp.bfloat16.

  Raises:
    ValueError: parameters cannot be held in this dtype.
  """
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

  def get(self, key: str, default: Any = None) -> Any:
    """Returns the value unchecked, or the default if it is missing."""
    value = self.values.get(key)
    return default if value is None else value

  def size(self, key: str, default: int | None = None) -> int:
    """Returns an integer of at least 1."""
    value = self.get(key, default)
    if type(value) is not int or value < 1:
      raise self.unexpected(key, 'an integer of at least 1')
    return value

  def layers(self, key: str, most: int = MOST_LAYERS) -> int:
    """Returns a number of layers, an integer from 1 to `most`."""
    value = self.size(key)
    if value > most:
      raise self.unexpected(key, f'an integer from 1 to {most}')
    return value

  def number(self, key: str, default: float | None = None) -> float:
    """Returns a number above 0."""
    value = self.get(key, default)
    if type(value) not in (int, float) or not value > 0:
      raise self.unexpected(key, 'a number above 0')
    return float(value)

  def optional_number(self, key: str) -> float | None:
    """Returns a number above 0, or None if it is missing."""
    return None if self.get(key) is None else self.number(key)

  def flag(self, key: str, default: bool = False) -> bool:
    """Returns true or false."""
    value = self.get(key, default)
    if type(value) is not bool:
      raise self.unexpected(key, 'true or false')
    return value

  def only(self, key: str, supported: Any) -> None:
    """Raises ValueError unless the value is missing or the supported one."""
    value = self.get(key, supported)
    if value != supported:
      raise ValueError(
        f'{self.origin}: {key} is {value!r}, but only {supported!r} is '
        'supported: give a checkpoint with that setting'
      )

  def part(self, key: str) -> 'Config':
    """Returns the object at a key, empty if it is missing."""
    value = self.get(key, {})
    if not isinstance(value, dict):
      raise self.unexpected(key, 'an object')
    return Config(value, self.origin)

  def unexpected(self, key: str, expected: str) -> ValueError:
    """Returns the error for a value that is not what was expected."""
    return ValueError(
      f'{self.origin}: {key} is {self.get(key)!r}, expected {expected}: the '
      'file is damaged, or is for another architecture'
    )
