"""The speedup that the parts of a round predict, beside the measured one.

Nothing that was timed as a whole is used. The parts were timed separately (see
`round_parts`), in turns with autoregressive decoding, so that a slowdown of the
machine affects both; of the generations only tokens and rounds are counted.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

import numpy as np

from experiments.reporting import rows as rows_lib
from experiments.timing import round_times
import specsample
from specsample.loop import request


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
  own = _ms_per_token(
    runs,
    round_ms=parts['draft_ms']
    + round_times.by_drafts(parts['verify_ms'], _most_drafts(runs))
    + round_times.by_drafts(parts['overhead_ms'], _most_drafts(runs)),
    prefill_ms=parts['prefill_ms'],
    prefill_tokens=parts['prefill_tokens'],
    least_width=least_width,
  )
  plain = _ms_per_token(
    baseline,
    round_ms=np.full(_most_drafts(baseline) + 1, parts['plain_ms']),
    prefill_ms=parts['plain_prefill_ms'],
    prefill_tokens=parts['prefill_tokens'],
    least_width=least_width,
  )
  return plain / own if min(plain, own) > 0 else None


def mean_ms(
  runs: Sequence[rows_lib.Generation], by_width: Mapping[str, float]
) -> float:
  """Returns the mean time of a part over the rounds of generations."""
  counts = np.sum([rounds_by_drafts(rows) for rows in _batches(runs)], axis=0)
  of_rounds = round_times.by_drafts(by_width, _most_drafts(runs))
  return float(np.average(of_rounds, weights=counts))


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

  Args:
    prompt_tokens: the length of each prompt.
    least_width: the width to which shorter prompts are padded.
  """
  longest = max(prompt_tokens)
  padded, _ = specsample.pad_prompts([[0] * longest])
  chunk = min(request.PREFILL_CHUNK, max(padded.shape[1], least_width))
  return -(-(longest - 1) // chunk) * chunk


def _ms_per_token(runs, *, round_ms, prefill_ms, prefill_tokens, least_width):
  total = 0.0
  for rows in _batches(runs):
    fed = fed_tokens([run.prompt_tokens for run in rows], least_width)
    # Nothing is fed if all prompts are one token each.
    total += prefill_ms * fed / max(prefill_tokens, 1)
    # Rows that are done wait for the last row.
    total += float(rounds_by_drafts(rows) @ round_ms)
  return total / _num_tokens(runs)


def _batches(runs):
  of_batch = itertools.groupby(runs, lambda run: run.call)
  return [list(rows) for _, rows in of_batch]


def _most_drafts(runs):
  return len(runs[0].stats.proposed) - 1


def _num_tokens(runs):
  return sum(len(run.tokens) for run in runs)
