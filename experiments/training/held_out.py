"""How a drafter would do on answers that it has not learned.

At temperature 0 the target's own answer says what it keeps of a draft. So one
pass over the answer gives every draft that would be right, and going through
them round by round what decoding would count, without decoding.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from specsample import sharding
from specsample import stats as stats_lib
from specsample.training import objective as objective_lib


def evaluate(
  params: Any,
  batches: Iterable[Mapping[str, np.ndarray]],
  objective: objective_lib.Objective,
  eos_ids: Sequence[int] = (),
) -> tuple[float, stats_lib.Stats]:
  """The mean loss, and the counts of greedy decoding.

  Args:
    params: the whole tree, in the dtype of the computation.
    batches: of greedy answers.
    objective: what is trained for.
    eos_ids: the tokens that end an answer; others end at their limit.
  """
  losses, weights, counts = [], [], []
  for batch in batches:
    loss, matches = _evaluate(params, place(batch), objective=objective)
    losses.append(float(loss))
    weights.append(batch['mask'].sum())
    ends = np.isin(batch['tokens'], eos_ids)
    counts.append(replay(np.asarray(matches), batch['mask'], ends))
  total = functools.reduce(lambda a, b: a + b, counts)
  return float(np.average(losses, weights=weights)), total


def replay(
  matches: np.ndarray, mask: np.ndarray, ends: np.ndarray
) -> stats_lib.Stats:
  """Counts the rounds in which greedy decoding writes the answers.

  Args:
    matches: [K, B, T] bool, as `objective.Objective.matches`.
    mask: [B, T] bool, the tokens of the answers; each run of a row is an
      answer.
    ends: [B, T] bool, the tokens that end a text. An answer whose last token is
      another one was cut at its limit.
  """
  num_drafts = len(matches)
  leading = np.cumprod(matches, axis=0, dtype=np.int32).sum(axis=0)
  proposed = np.zeros(num_drafts + 1, int)
  accepted = np.zeros(num_drafts + 1, int)
  edges = np.diff(mask.astype(int), axis=1, prepend=0, append=0)
  for kept, edge, is_end in zip(leading, edges, ends, strict=True):
    starts, stops = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    for pending, last in zip(starts - 1, stops - 1, strict=True):
      while pending < last:
        # A round emits one token more than it keeps drafts, up to the limit.
        room = num_drafts if is_end[last] else last - pending - 1
        drafted = min(num_drafts, room)
        emitted = min(kept[pending], drafted)
        proposed[drafted] += 1
        accepted[emitted] += 1
        pending += emitted + 1
  return stats_lib.Stats(
    tokens=int(mask.sum()),
    rounds=int(proposed.sum()),
    proposed=tuple(proposed.tolist()),
    accepted=tuple(accepted.tolist()),
  )


def place(batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """The batch on the devices, its rows divided."""
  axes = {k: ('batch',) + (None,) * (x.ndim - 1) for k, x in batch.items()}
  return sharding.place(dict(batch), axes)


@functools.partial(jax.jit, static_argnames=('objective',))
def _evaluate(params, batch, *, objective):
  loss, _ = objective(params, batch)
  return sharding.replicate((loss, objective.matches(params, batch)))
