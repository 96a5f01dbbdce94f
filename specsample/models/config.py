"""Values of a model's configuration, as foreign formats store them."""

from collections.abc import Mapping
from typing import Any


def check_dtype(dtype: str) -> None:
  """Raises ValueError unless parameters can be held in `dtype`."""
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype is {dtype!r}: load as 'float32' or as 'bfloat16'")


def size(
  config: Mapping[str, Any],
  key: str,
  *,
  origin: str,
  default: int | None = None,
) -> int:
  """A positive integer of a configuration; ValueError if it is none."""
  value = _value(config, key, default)
  if type(value) is not int or value < 1:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected an integer of at least 1: the '
      'file is damaged, or of another architecture'
    )
  return value


def number(
  config: Mapping[str, Any],
  key: str,
  *,
  origin: str,
  default: float | None = None,
) -> float:
  """A positive number of a configuration; ValueError if it is none."""
  value = _value(config, key, default)
  if type(value) not in (int, float) or not value > 0:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected a number above 0: the file is '
      'damaged, or of another architecture'
    )
  return float(value)


def flag(config: Mapping[str, Any], key: str, *, origin: str) -> bool:
  """A truth value of a configuration, False where it has none."""
  value = _value(config, key, False)
  if type(value) is not bool:
    raise ValueError(
      f'{origin}: {key} is {value!r}, expected true or false: the file is '
      'damaged, or of another architecture'
    )
  return value


def _value(config, key, default):
  value = config.get(key)
  return default if value is None else value
