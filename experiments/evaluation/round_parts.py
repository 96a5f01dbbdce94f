"""The parts of a round, timed between the generations that they explain.

They are timed a few rounds at a time, between batches that are evenly spread
over the run, so that a machine that becomes faster or slower affects both.
After a long prompt a pass over a draft takes longer, so the parts are timed
after short, middling and long prompts.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from experiments.command import journal as journal_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import predicted_speedup
from experiments.timing import round_times

# The first part of the journal's keys; the method and the turn follow.
KIND = 'parts'


def share_out(repeats: int, batches: int) -> list[int]:
  """Returns how many of the repeats come after each of the batches.

  Args:
    repeats: the number of repeats in total.
    batches: the number of batches; some repeats always come after the last one.
  """
  count = min(repeats, batches)
  shares = [0] * batches
  for i in range(count):
    share = (i + 1) * repeats // count - i * repeats // count
    shares[(i + 1) * batches // count - 1] = share
  return shares


def spread(count: int) -> list[float]:
  """Returns numbers from 0 to 1, evenly spread and in no order.

  These are the lengths of the prompts of each visit, as the share of the
  prompts that are shorter. In order, they would rise while the machine becomes
  slower, say.
  """
  # By the golden ratio, each falls into the largest gap that is left.
  return [(0.5 + i * (5**0.5 - 1) / 2) % 1 for i in range(count)]


def measure(
  setup: setup_lib.Setup, tokens: Sequence[list[int]], *, repeats: int
) -> dict[str, Any]:
  """Times the parts of a method's rounds; the result is a unit of the journal.

  Args:
    setup: the setup that decodes.
    tokens: a batch of prompts.
    repeats: how often each part is timed.
  """
  times = round_times.times(setup, tokens, repeats=repeats)
  return dataclasses.asdict(times) | {
    'kind': times.kind.value,
    'prefill_tokens': predicted_speedup.fed_tokens(
      [len(row) for row in tokens], setup.least_width
    ),
  }


def means(journal: journal_lib.Journal, name: str) -> dict[str, Any]:
  """Returns the means of what `measure` found for a method.

  They are means because the times of generations are means too.
  """
  means = _mean(journal.of(KIND, name))
  draft_ms, rest = round_times.settled(means['draft_ms'], means['overhead_ms'])
  return means | {'draft_ms': draft_ms, 'overhead_ms': rest}


def _mean(found: Sequence[Any]) -> Any:
  """Averages numbers, within dictionaries too; text is the same in all."""
  first = found[0]
  if isinstance(first, dict):
    return {name: _mean([one[name] for one in found]) for name in first}
  return first if isinstance(first, str) else float(np.mean(found))
