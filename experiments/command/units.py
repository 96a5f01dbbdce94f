"""Units of work that are warmed up, timed and journalled, each only once."""

from collections.abc import Callable, Sequence
import dataclasses
import pathlib
from typing import Any

import jax

from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.command import progress as progress_lib

# Each program that XLA compiles for the CPU takes about 250 memory mappings of
# the 65,530 that Linux allows a process by default; beyond the limit, the
# compiler ends the process.
_LIMIT = pathlib.Path('/proc/sys/vm/max_map_count')
_OWN = pathlib.Path('/proc/self/maps')
# The share of the limit to use; the next unit's programs must fit in the rest.
_MOST = 0.75


def are_few_mappings_left() -> bool:
  """Returns whether most mappings are used up; False if it is not known."""
  try:
    limit = int(_LIMIT.read_text())
    with _OWN.open('rb') as lines:
      used = sum(1 for _ in lines)
  except OSError:  # not Linux
    return False
  return used > _MOST * limit


@dataclasses.dataclass(frozen=True)
class Unit:
  """A piece of work that is journalled when it is done."""

  label: str
  key: tuple
  # Returns None if there is nothing to keep; then the next run tries again.
  run: Callable[[], dict[str, Any] | None]
  # The program to compile before `run` can be timed, and what compiles it.
  program: tuple = ()
  warm_up: Callable[[], Any] = lambda: None
  # Whether a file that the unit leaves is gone. Then it is done again, even if
  # the journal has it.
  is_lost: bool = False


def run(
  work: Sequence[Unit],
  journal: journal_lib.Journal,
  progress: progress_lib.Bar,
  is_full: Callable[[], bool] = are_few_mappings_left,
) -> None:
  """Runs the units that are not in the journal yet.

  Several processes run the same units in the same order: those that the first
  one lacks. When `is_full`, there is no room for more executables: all are
  dropped, and a unit's program is warmed up again.
  """
  lacks = distributed.from_first(
    [unit.is_lost or unit.key not in journal for unit in work]
  )
  missing = [unit for unit, lack in zip(work, lacks, strict=True) if lack]
  # The first unit of each program warms it up.
  programs = {unit.program: unit for unit in reversed(missing) if unit.program}
  warm: set[tuple] = set()
  # Two bars: the time left is estimated from steps, and these differ in length.
  with progress(len(programs)) as step:
    for unit in reversed(programs.values()):
      step(f'warm-up, {unit.label}')
      _warm_up(unit, warm, is_full)
  with progress(len(missing)) as step:
    for unit in missing:
      step(unit.label)
      _warm_up(unit, warm, is_full)
      value = unit.run()
      if value is not None and unit.key not in journal:
        journal.add(unit.key, value)


def _warm_up(unit, warm, is_full):
  """Compiles the unit's program unless it is warm; if full, first drops all."""
  if distributed.from_first(is_full()):
    jax.clear_caches()
    warm.clear()
  if unit.program and unit.program not in warm:
    jax.block_until_ready(unit.warm_up())
    warm.add(unit.program)
