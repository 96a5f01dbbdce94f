"""The parts of a round, timed between the generations that they explain.

They are timed a few rounds at a time, between batches that are evenly spread
over the run, so that a machine that becomes faster or slower affects both.
After a long prompt a pass over a draft takes longer, so the parts are timed
after short, middling and long prompts.

The speedup that the parts predict uses nothing that was timed as a whole: of
the generations only tokens and rounds are counted.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from experiments.command import journal as journal_lib
from experiments.decoding import setup as setup_lib
from experiments.reporting import rows as rows_lib
from experiments.timing import round_times
import specsample
from specsample.loop import request

# The first part of the journal's keys; the method and the turn follow.
KIND = 'parts'


def visits(repeats: int, num_batches: int) -> dict[int, tuple[int, float]]:
  """Returns after which batches parts are timed.

  Each visit has the number of its repeats and the length of its prompts, as the
  share of the prompts that are shorter. In order, these would rise while the
  machine becomes slower, say. By the golden ratio, each falls into the largest
  gap that is left.
  """
  count = min(repeats, num_batches)
  return {
    (i + 1) * num_batches // count - 1: (
      -(-repeats // count),
      (0.5 + i * (5**0.5 - 1) / 2) % 1,
    )
    for i in range(count)
  }


def measure(
  setup: setup_lib.Setup, tokens: Sequence[list[int]], repeats: int
) -> dict[str, Any]:
  """Times the parts of a method's rounds, as a unit of the journal."""
  times = round_times.times(setup, tokens, repeats=repeats)
  fed = fed_tokens(list(map(len, tokens)), setup.least_width)
  return dataclasses.asdict(times) | {
    'kind': times.kind.value,
    'prefill_tokens': fed,
  }


def means(journal: journal_lib.Journal, name: str) -> dict[str, Any]:
  """Returns the means of what `measure` found for a method.

  They are means because the times of generations are means too.
  """
  means = _mean(journal.of(KIND, name))
  draft_ms, rest = round_times.settled(means['draft_ms'], means['overhead_ms'])
  return means | {'draft_ms': draft_ms, 'overhead_ms': rest}


def speedup(
  runs: Sequence[rows_lib.Generation],
  baseline: Sequence[rows_lib.Generation],
  parts: Mapping[str, Any],
  least_width: int = 1,
) -> float | None:
  """Returns the baseline's predicted time per token over the method's.

  The result is None if either of them emitted nothing, if noise hid the time of
  a round, or if a prefill is needed and its time is unknown, because the
  typical prompts are one token each. `parts` are the method's, as the journal
  has them; `least_width` is as for `fed_tokens`.
  """
  if not (_num_tokens(runs) and _num_tokens(baseline)):
    return None
  if not parts['prefill_tokens'] and any(
    fed_tokens([run.prompt_tokens]) for run in runs
  ):
    return None
  round_ms = parts['draft_ms'] + sum(
    round_times.by_drafts(parts[part], _most_drafts(runs))
    for part in ('verify_ms', 'overhead_ms')
  )
  plain_ms = np.full(_most_drafts(baseline) + 1, parts['plain_ms'])
  # Nothing is fed if all prompts are one token each.
  fed = max(parts['prefill_tokens'], 1)
  own = _ms_per_token(runs, round_ms, parts['prefill_ms'] / fed, least_width)
  plain = _ms_per_token(
    baseline, plain_ms, parts['plain_prefill_ms'] / fed, least_width
  )
  return plain / own if min(plain, own) > 0 else None


def mean_ms(
  runs: Sequence[rows_lib.Generation], by_width: Mapping[str, float]
) -> float:
  """Returns the mean time of a part over the rounds of generations."""
  counts = np.sum([rounds_by_drafts(rows) for rows in batches(runs)], axis=0)
  of_rounds = round_times.by_drafts(by_width, _most_drafts(runs))
  return float(np.average(of_rounds, weights=counts))


def batches(
  runs: Sequence[rows_lib.Generation],
) -> list[list[rows_lib.Generation]]:
  """Returns the generations of each batch."""
  of_batch = itertools.groupby(runs, lambda run: run.call)
  return [list(rows) for _, rows in of_batch]


def rounds_by_drafts(rows: Sequence[rows_lib.Generation]) -> np.ndarray:
  """Counts the rounds of a batch by the drafts of its widest row, [K + 1].

  The counts are exact for one row. A row's own counts do not say which of its
  rounds were wide. Several rows are therefore assumed to draft independently of
  each other, with the same distribution in all rounds of a row, and the counts
  are expectations.
  """
  most = max(run.stats.rounds for run in rows)
  # In each round, the chance that no row drafts more than i tokens.
  at_most = np.ones((most, _most_drafts(rows) + 1))
  for run in rows:
    # A row that is done drafts nothing.
    share = np.cumsum(run.stats.proposed) / max(run.stats.rounds, 1)
    at_most[: run.stats.rounds] *= share
  return np.diff(at_most.sum(axis=0), prepend=0)


def fed_tokens(prompt_tokens: Sequence[int], least_width: int = 1) -> int:
  """Returns how many tokens of a row the prefill feeds, given prompt lengths.

  It feeds whole chunks, as many as the longest prompt of the batch needs.
  Shorter ones are padded to `least_width`.
  """
  longest = max(prompt_tokens)
  padded, _ = specsample.pad_prompts([[0] * longest])
  chunk = min(request.PREFILL_CHUNK, max(padded.shape[1], least_width))
  return -(-(longest - 1) // chunk) * chunk


def _mean(found: Sequence[Any]) -> Any:
  """Averages numbers, within dictionaries too; text is the same in all."""
  first = found[0]
  if isinstance(first, dict):
    return {name: _mean([one[name] for one in found]) for name in first}
  return first if isinstance(first, str) else float(np.mean(found))


def _ms_per_token(runs, round_ms, ms_per_fed_token, least_width):
  total = 0.0
  for rows in batches(runs):
    fed = fed_tokens([run.prompt_tokens for run in rows], least_width)
    total += ms_per_fed_token * fed
    # Rows that are done wait for the last row.
    total += float(rounds_by_drafts(rows) @ round_ms)
  return total / _num_tokens(runs)


def _most_drafts(runs):
  return len(runs[0].stats.proposed) - 1


def _num_tokens(runs):
  return sum(len(run.tokens) for run in runs)
