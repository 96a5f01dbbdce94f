"""Linux's limit on the memory mappings of a process, which executables use up.

Each program that XLA compiles for the CPU takes about 250 of the 65,530 that
Linux allows by default; beyond the limit, the compiler ends the process.
"""

import pathlib

_LIMIT = pathlib.Path('/proc/sys/vm/max_map_count')
_OWN = pathlib.Path('/proc/self/maps')
# The share of the limit to use; the next unit's programs must fit in the rest.
_MOST = 0.75


def are_few_left() -> bool:
  """Returns whether most mappings are used up; False if that is not known."""
  try:
    limit = int(_LIMIT.read_text())
    with _OWN.open('rb') as lines:
      used = sum(1 for _ in lines)
  except OSError:  # not Linux
    return False
  return used > _MOST * limit
