"""Pieces of work that are warmed up, timed and journalled, each but once."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from experiments.command import distributed
from experiments.command import journal as journal_lib
from experiments.command import mappings
from experiments.command import progress as progress_lib


@dataclasses.dataclass(frozen=True)
class Unit:
  """A piece of work that is journalled when it is done."""

  label: str
  key: tuple
  # None where there is nothing to keep: the next run tries again.
  run: Callable[[], dict[str, Any] | None]
  # What has to be compiled before `run` can be timed, and how.
  program: tuple = ()
  warm_up: Callable[[], Any] = lambda: None
  # Whether a file that it leaves is gone: then it is done again, even where the
  # journal has it.
  is_lost: bool = False


def run(
  work: Sequence[Unit],
  journal: journal_lib.Journal | None,
  progress: progress_lib.Bar,
  is_full: Callable[[], bool] = mappings.are_few_left,
) -> None:
  """Does what the journal lacks; `progress` shows it, see `progress.bar`.

  Of several processes the first has the journal. The others, None here, do the
  same units in the same order.

  Args:
    work: what is to be done.
    journal: has what was done before.
    progress: shows it.
    is_full: whether there is no room for more executables. Then all are
      dropped, and a unit's program is warmed up once more.
  """
  lacks = distributed.from_first(
    np.asarray(
      [
        journal is not None and (unit.is_lost or unit.key not in journal)
        for unit in work
      ]
    )
  )
  missing = [unit for unit, lack in zip(work, lacks, strict=True) if lack]
  # The first unit of each program warms it up.
  programs = {unit.program: unit for unit in reversed(missing) if unit.program}
  warm: set[tuple] = set()
  # A bar for each, as they take unlike times and the rest is estimated by them.
  with progress(len(programs)) as step:
    for unit in reversed(programs.values()):
      step(f'warm-up, {unit.label}')
      _warm_up(unit, warm, is_full)
  with progress(len(missing)) as step:
    for unit in missing:
      step(unit.label)
      _warm_up(unit, warm, is_full)
      value = unit.run()
      if journal is None or value is None or unit.key in journal:
        continue
      journal.add(unit.key, value)


def _warm_up(unit, warm, is_full):
  """Has all compiled that the unit runs, if it was not or is dropped now."""
  if distributed.from_first(np.asarray([is_full()]))[0]:
    jax.clear_caches()
    warm.clear()
  if unit.program and unit.program not in warm:
    jax.block_until_ready(unit.warm_up())
    warm.add(unit.program)
