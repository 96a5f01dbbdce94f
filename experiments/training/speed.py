"""The speed of training: tokens per second, and the share of the peak."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specsample.cost import chips


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
  """Returns the peak of all devices in bfloat16 products per second.

  None if the peak of such a device is not known.
  """
  chip = chips.of_kind(devices[0].device_kind)
  return None if chip is None else len(devices) * chip.flops


def measured(
  num_tokens: int, operations: float, seconds: float, peak: float | None
) -> dict[str, Any]:
  """Returns the values of some steps, for the journal.

  Args:
    num_tokens: the tokens of answers that were learned.
    operations: those of `training.operations.count`, over all devices.
    seconds: the time that the steps took.
    peak: from `peak_flops`.
  """
  found = {'answer_tokens': num_tokens, 'seconds': round(seconds, 3)}
  if peak is None:
    return found
  return found | {'share_of_peak': round(operations / seconds / peak, 6)}


def describe(values: Mapping[str, Any]) -> str:
  """Returns in words what `measured` has found."""
  found = f'{values["answer_tokens"] / values["seconds"]:,.0f} tokens/s'
  if 'share_of_peak' in values:
    found += f', {values["share_of_peak"]:.1%} of peak'
  return found
