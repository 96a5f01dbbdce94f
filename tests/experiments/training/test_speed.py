"""Speed in the journal and on the line that shows a run's progress."""

import dataclasses

import jax

from experiments.training import speed


@dataclasses.dataclass(frozen=True)
class _Device:
  """The attribute of a device that its peak follows from."""

  device_kind: str


def test_share_is_of_the_peak_of_all_devices():
  # Four chips of 197e12 operations per second, for half a second.
  peak = speed.peak_flops(4 * [_Device('TPU v5 lite')])
  found = speed.measured(1000, 39.4e12, 0.5, peak)
  assert found == {
    'answer_tokens': 1000,
    'seconds': 0.5,
    'share_of_peak': 0.1,
  }
  assert speed.describe(found) == '2,000 tokens/s, 10.0% of peak'


def test_nothing_is_said_of_a_peak_that_is_not_known():
  peak = speed.peak_flops(jax.devices('cpu'))
  found = speed.measured(1000, 1e12, 0.5, peak)
  assert found == {'answer_tokens': 1000, 'seconds': 0.5}
  assert speed.describe(found) == '2,000 tokens/s'
