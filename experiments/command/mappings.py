"""Linux's limit on the mappings of a process, which executables run into.

Each program that XLA compiles for the CPU takes some 250 of the 65,530 that
Linux allows by default; over it the compiler ends the process.
"""

import pathlib

_LIMIT = pathlib.Path('/proc/sys/vm/max_map_count')
_OWN = pathlib.Path('/proc/self/maps')
# Of the limit: what one more unit of work compiles has to fit behind it.
_MOST = 0.75


def are_few_left() -> bool:
  """Whether this process has used most of what it may; not known, False."""
  try:
    limit = int(_LIMIT.read_text())
    with _OWN.open('rb') as lines:
      used = sum(1 for _ in lines)
  except OSError:  # not Linux
    return False
  return used > _MOST * limit
