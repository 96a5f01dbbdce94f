"""Measures of generations, each with its 95% interval.

All are ratios of sums over generations. The units of their intervals are
batches (prompts, if a batch holds one), each with all samples of its prompts
and, compared with a baseline, the baseline's generations for them.
"""

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from experiments.reporting import intervals
from experiments.reporting import rows


def _speedup(sums):
  baseline = sums['baseline seconds'] / sums['baseline tokens']
  return baseline / (sums['seconds'] / sums['tokens'])


_ALONE: dict[str, intervals.Ratio] = {
  'tokens_per_round': lambda sums: sums['tokens'] / sums['rounds'],
  'acceptance': lambda sums: sums['kept'] / sums['judged'],
  'ms_per_token': lambda sums: 1e3 * sums['seconds'] / sums['tokens'],
}
_AGAINST: dict[str, intervals.Ratio] = {
  # Over all tokens together.
  'speedup': _speedup,
  # The ratio of the prompts' mean tokens per second, as in Spec-Bench: each
  # prompt has the same weight, however long its answers are. All turns of a
  # conversation count together.
  'mean_speedup': lambda sums: sums['rate'] / sums['baseline rate'],
}


def row_fields(
  runs: Sequence[rows.Generation],
  baseline: Sequence[rows.Generation] | None,
) -> dict[str, Any]:
  """Returns the fields of a `rows.Row` that follow from timed generations.

  `baseline` has the same prompts in the same order; None if it was not run.
  """
  total = runs[0].stats
  for run in runs[1:]:
    total += run.stats
  samples = 1 + max(run.sample for run in runs)
  return {
    'prompts': [run.turn for run in runs].count(runs[0].turn) // samples,
    'samples': samples,
    'tokens': total.tokens,
    'rounds': total.rounds,
    # Without a drafter, every round is plain.
    'plain_rounds': total.plain_rounds
    if total.rounds and len(total.proposed) > 1
    else None,
    'acceptance_by_position': [
      None if np.isnan(share) else share
      for share in total.acceptance_by_position
    ],
  } | measure(runs, baseline)


def measure(
  runs: Sequence[rows.Generation],
  baseline: Sequence[rows.Generation] | None = None,
) -> dict[str, Any]:
  """Returns each measure by name, and its interval by the name plus '_ci95'.

  A measure without a value is None, such as the acceptance rate if nothing is
  drafted, or one against the baseline if there is none. So is an interval from
  one or two batches, which say little about others. The baseline has the same
  prompts in the same order.
  """
  found: dict[str, Any] = {}
  batches = _sums(runs, baseline)
  for name, ratio in (_ALONE | _AGAINST).items():
    value = interval = None
    if baseline is not None or name in _ALONE:
      value = _value(ratio, batches)
      most = 1.0 if name == 'acceptance' else math.inf
      interval = intervals.interval(ratio, batches, most=most)
    found |= {name: value, f'{name}_ci95': interval}
  return found


# The measures that `ratio` accepts.
RATIOS = (*_ALONE, 'speedup')


def ratio(
  runs: Sequence[rows.Generation],
  over: Sequence[rows.Generation],
  name: str,
) -> tuple[float | None, list[float] | None]:
  """Returns one of `RATIOS` of a method over another's, and its interval.

  Both have the same prompts in the same order.
  """

  def of_both(sums):
    if name == 'speedup':
      return _speedup(sums)
    of_other = {each: sums[f'baseline {each}'] for each in _terms(runs[0])}
    return _ALONE[name](sums) / _ALONE[name](of_other)

  batches = _sums(runs, over)
  return _value(of_both, batches), intervals.interval(of_both, batches)


def _sums(runs, baseline) -> dict[str, np.ndarray]:
  """Returns the sums of the terms of each batch, by name."""
  batches: dict[int, dict[str, float]] = {}
  for i, run in enumerate(runs):
    terms = _terms(run)
    if baseline is not None:
      against = _terms(baseline[i]).items()
      terms |= {f'baseline {name}': term for name, term in against}
    sums = batches.setdefault(run.batch, dict.fromkeys(terms, 0))
    for name, term in terms.items():
      sums[name] += term
  _add_rates(batches, 'rate', runs, runs)
  if baseline is not None:
    _add_rates(batches, 'baseline rate', runs, baseline)
  names = next(iter(batches.values()))
  return {
    name: np.asarray([sums[name] for sums in batches.values()], float)
    for name in names
  }


def _add_rates(batches, name, runs, timed) -> None:
  """Adds each batch's sum of its conversations' tokens per second.

  `timed` are the generations that count, of the same prompts as `runs`.
  """
  totals: dict[tuple, list[float]] = {}
  for run, one in zip(runs, timed, strict=True):
    total = totals.setdefault((run.batch, run.prompt, run.sample), [0, 0])
    total[0] += len(one.tokens)
    total[1] += one.seconds
  for (batch, *_), (tokens, seconds) in totals.items():
    # A row that emitted nothing has no share of its batch's seconds.
    rate = tokens / seconds if tokens else 0
    batches[batch][name] = batches[batch].get(name, 0) + rate


def _terms(run) -> dict[str, float]:
  return {
    'seconds': run.seconds,
    'tokens': len(run.tokens),
    'rounds': run.stats.rounds,
    'kept': run.stats.kept,
    'judged': run.stats.judged,
  }


def _value(ratio: intervals.Ratio, batches) -> float | None:
  with np.errstate(divide='ignore', invalid='ignore'):
    value = float(ratio({name: x.sum() for name, x in batches.items()}))
  return value if np.isfinite(value) else None
