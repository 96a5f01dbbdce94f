"""Features of the processor, which decide how products are computed."""

import functools
import os
import pathlib


@functools.cache
def has_avx512() -> bool:
  """Returns whether this machine is a CPU with AVX-512, as Linux reports."""
  try:
    return ' avx512f' in pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return False


def num_cores() -> int:
  """Returns how many cores this process may use."""
  return len(os.sched_getaffinity(0))
