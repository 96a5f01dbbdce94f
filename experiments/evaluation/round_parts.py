"""The parts of a round, timed between the generations they are to explain.

Behind typical prompts, a few rounds at a time, behind batches that are evenly
spread: a machine that becomes faster or slower does so for both.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from experiments.command import journal as journal_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import predicted_speedup
from experiments.timing import round_times

# Of the journal's keys the first; behind it the method and the batch.
KIND = 'parts'


def share_out(repeats: int, visits: int, batches: int) -> list[int]:
  """How many of the repeats come behind each of the batches.

  Args:
    repeats: in all.
    visits: behind how many batches there are some, at most.
    batches: how many there are; behind the last one there are always some.
  """
  count = min(repeats, visits, batches)
  shares = [0] * batches
  for i in range(count):
    share = (i + 1) * repeats // count - i * repeats // count
    shares[(i + 1) * batches // count - 1] = share
  return shares


def measure(
  setup: setup_lib.Setup, tokens: Sequence[list[int]], *, repeats: int
) -> dict[str, Any]:
  """Times the rounds of a method: a unit of the journal.

  Args:
    setup: decodes.
    tokens: of a batch of prompts.
    repeats: of each part.
  """
  times = round_times.times(setup, tokens, repeats=repeats)
  return dataclasses.asdict(times) | {
    'law': times.law.value,
    'prefill_tokens': predicted_speedup.fed_tokens(
      [len(row) for row in tokens]
    ),
  }


def of(journal: journal_lib.Journal, name: str) -> dict[str, Any]:
  """What `measure` found of a method: means, as those of generations are."""
  means = _mean(journal.of(KIND, name))
  draft_ms, rest = round_times.settled(means['draft_ms'], means['overhead_ms'])
  less = rest - means['overhead_ms']
  by_width = means.get('overhead_ms_by_width', {})
  return means | {
    'draft_ms': draft_ms,
    'overhead_ms': rest,
    'overhead_ms_by_width': {w: ms + less for w, ms in by_width.items()},
  }


def _mean(found: Sequence[Any]) -> Any:
  """The mean of numbers, within dictionaries too, or the text that all are."""
  first = found[0]
  if isinstance(first, dict):
    return {name: _mean([one[name] for one in found]) for name in first}
  return first if isinstance(first, str) else float(np.mean(found))
