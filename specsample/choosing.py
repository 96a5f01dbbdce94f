"""Chooses how to decode a target on the machine at hand.

What a draft brings is on the card of its drafter, and what a pass costs is
measured here, once. Where drafting does not pay, the choice is plain decoding.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from specsample import checks
from specsample import cost
from specsample import drafter_card
from specsample import drafter_files
from specsample import drafters
from specsample import files
from specsample import loading
from specsample import measured_here
from specsample import pass_times
from specsample import policies
from specsample import sharding
from specsample import store_files
from specsample import verify as verify_lib
from specsample.types import Drafter, Params, Verifier

# Tokens of a row in the passes that are timed, and in its cache before.
_SIZES = (1, 2, 3, 5, 8, 16)
_CONTEXT = 128
_REPEATS = 9
# Lengths of remembered drafts; in how many rounds a row drafts, and how often a
# token of such a draft is kept: measured in docs/memory.md, 1.8 of 7.
_REMEMBERED = (3, 7, 15)
_REMEMBERED_SHARE = 0.45
_REMEMBERED_ACCEPTANCE = 0.65
# A trained drafter must promise so much. What was held out is like what it was
# trained on, and other texts keep less: cards that have acceptance on questions
# of people are read for that.
_MARGIN = 1.1
_ACCEPTANCE = ('on_questions', 'held_out')
# Of a round with drafts, besides the pass and the drafter, in passes.
_OVERHEAD = 0.05
# Times of one size that differ by more than this cannot be compared.
_NOISE = 0.5


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
  """How to decode, and why.

  Attributes:
    drafter: of at most as many drafts as pay here; `drafters.NoDraft` if none.
    verify: the rule for its drafts.
    drafter_params: the drafter's own parameters, None if it has none.
    reason: one line that says what was chosen, and why.
  """

  drafter: Drafter
  reason: str
  verify: Verifier = verify_lib.chain
  drafter_params: Params = None

  def params(self, target: loading.Loaded) -> Params:
    """The tree that `generate` takes, with the target's parameters."""
    params = {'target': target.params}
    if self.drafter_params is None:
      return params
    return params | {'drafter': self.drafter_params}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
  """What a trained drafter promises with its best number of drafts."""

  name: str
  num_draft_tokens: int
  speedup: float  # over plain decoding
  costs: tuple[float, ...]  # [K + 1] of rounds of 0, 1, ... drafts, 1 for none


def auto(target: loading.Loaded, *, batch_size: int = 1) -> Choice:
  """Chooses a drafter for a target by what pays on this machine.

  Considers remembered drafts (the row's own text, and the store that ships for
  the target) and the trained drafters that ship for it. Passes over 1 to 16
  tokens, and drafts of what may pay, are timed once on a machine and then known
  (`measured_here`). `drafters.Suffix` drafts where it expects more than the
  wider round costs, and a trained drafter as long as `policies.Fastest` finds
  that it pays in that row: both decide by the past alone, so that the output
  stays exact.

  Args:
    target: what to decode with.
    batch_size: rows that are decoded at once.

  Raises:
    ValueError: batch_size is no count.
  """
  batch_size = _rows(batch_size)
  times = _pass_seconds(target, batch_size)
  if _is_uneven(times):
    low, high = (1e3 * x for x in (min(times['1']), max(times['1'])))
    return Choice(
      drafter=drafters.NoDraft(),
      reason=f'decodes plainly: a pass took {low:.0f} to {high:.0f} ms, too '
      'uneven to tell what pays; try again on a quiet machine',
    )
  passes = pass_times_of(times, batch_size)
  stores = [
    name
    for name, folder in drafter_card.shipped(store_files.NAME).items()
    if files.read_json(files.at(folder / store_files.NAME)).get('target')
    == target.fingerprint
  ]
  promises = _promises(target, passes, batch_size)
  paying = [x for x in promises if x.speedup >= _MARGIN]
  return _choice(
    target,
    length=remembered_length(passes, batch_size),
    costs=_pass_costs(passes, batch_size, max(_REMEMBERED)),
    stores=sorted(stores),
    trained=paying[0] if paying else None,
    others=[x for x in promises if x not in paying[:1]],
  )


def costs(
  target: loading.Loaded,
  num_draft_tokens: int,
  *,
  batch_size: int = 1,
  trained: drafter_files.LoadedDrafter | None = None,
) -> tuple[float, ...]:
  """What rounds with 0, 1, ... K drafts in each row cost here, in plain passes.

  As `drafters.Suffix` and `policies.Fastest` take them. Timed once on a
  machine, as `auto` does.

  Args:
    target: what scores the drafts.
    num_draft_tokens: K, at most 15.
    batch_size: rows that are decoded at once.
    trained: the drafter whose drafts they are; None if drafting takes no time.

  Raises:
    ValueError: batch_size is no count, or K is none up to 15.
  """
  batch_size = _rows(batch_size)
  most = max(_SIZES) - 1
  if not (checks.is_count(num_draft_tokens) and num_draft_tokens <= most):
    raise ValueError(
      f'num_draft_tokens is {num_draft_tokens!r}: give 1 to {most}'
    )
  passes = pass_times_of(_pass_seconds(target, batch_size), batch_size)
  if trained is None:
    return _pass_costs(passes, batch_size, num_draft_tokens)
  seconds = _drafting_seconds(target, trained, batch_size)
  return _rounded(_round_costs(passes, batch_size, seconds))


def pass_times_of(
  seconds: Mapping[str, Sequence[float]], batch_size: int
) -> cost.PassTimes:
  """The table of the least times, which never fall as tokens are added.

  Args:
    seconds: by the number of tokens of a row.
    batch_size: rows.
  """
  sizes = sorted(map(int, seconds))
  least = np.maximum.accumulate([min(seconds[str(size)]) for size in sizes])
  return cost.PassTimes(
    tuple(batch_size * size for size in sizes), tuple(least.tolist())
  )


def remembered_length(passes: cost.PassTimes, batch_size: int) -> int:
  """How long remembered drafts should be, 0 if none would pay.

  A round of several rows is as wide as the longest of their drafts.
  """
  wide = 1 - (1 - _REMEMBERED_SHARE) ** batch_size

  def gain(length):
    kept = cost.expected_tokens(_REMEMBERED_ACCEPTANCE, length) - 1
    more = _ratio(passes, batch_size, length) - 1
    return (1 + _REMEMBERED_SHARE * kept) / (1 + wide * more)

  best = max(_REMEMBERED, key=gain)
  return best if gain(best) > 1 else 0


def promise(
  name: str,
  shares: Sequence[float],
  passes: cost.PassTimes,
  batch_size: int,
  draft_seconds: Sequence[float],
) -> Promise:
  """What a trained drafter promises here.

  Args:
    name: of the drafter.
    shares: [K] of rounds that keep draft 1, 2, ... K, on its card.
    passes: of the target.
    batch_size: rows.
    draft_seconds: [K + 1] of drafting 0, 1, ... K tokens.
  """
  costs = _round_costs(passes, batch_size, draft_seconds)
  speedups = [
    cost.expected_tokens_by_position(shares[:length]) / costs[length]
    for length in range(1, len(costs))
  ]
  best = int(np.argmax(speedups))
  return Promise(
    name=name,
    num_draft_tokens=1 + best,
    speedup=speedups[best],
    costs=_rounded(costs[: 2 + best]),
  )


def _round_costs(passes, batch_size, draft_seconds):
  """What rounds of 0, 1, ... K drafts cost, in plain passes."""
  costs = [1.0]
  for length, seconds in enumerate(draft_seconds[1:], start=1):
    verified = _ratio(passes, batch_size, length)
    costs.append(verified + seconds / passes(batch_size) + _OVERHEAD)
  return costs


def _pass_costs(passes, batch_size, num_draft_tokens):
  """As `_round_costs`, where drafting takes no time."""
  free = [0.0] * (num_draft_tokens + 1)
  return _rounded(_round_costs(passes, batch_size, free))


def _rounded(costs):
  return tuple(round(cost, 3) for cost in costs)


def _rows(batch_size):
  """The batch size that `generate` pads to on a mesh."""
  if not checks.is_count(batch_size):
    raise ValueError(f'batch_size is {batch_size}: give at least 1')
  parts = sharding.batch_parts()
  return -(-batch_size // parts) * parts


def _ratio(passes, batch_size, length):
  """A pass over so many drafts and the pending token, over a plain one."""
  return passes(batch_size * (length + 1)) / passes(batch_size)


def _pass_seconds(target, batch_size):
  length = min(_CONTEXT, target.model.max_length - max(_SIZES) - 1)

  def measure():
    found = pass_times.passes(
      {'target': target.params},
      target.model,
      _SIZES,
      length=length,
      max_length=length,
      batch=batch_size,
      times=2,
      repeats=_REPEATS,
    )
    return {str(size): seconds for size, seconds in found.items()}

  what = {'passes': repr(target.model), 'batch': batch_size, 'sizes': _SIZES}
  return _times(what, measure, lambda x: not _is_uneven(x))


def _times(what, measure, is_good):
  """The times, kept on this machine; of several processes the first one's."""
  if jax.process_count() == 1:
    return measured_here.recall(what, measure, is_good)
  # All run the same passes, and then choose alike.
  times = measure()
  names = sorted(times)
  found = multihost_utils.broadcast_one_to_all(
    np.asarray([times[name] for name in names])
  )
  return dict(zip(names, np.asarray(found).tolist(), strict=True))


def _is_uneven(times: Mapping[str, Sequence[float]]) -> bool:
  of_one = np.asarray(times['1'])
  return bool(np.median(of_one) > (1 + _NOISE) * np.min(of_one)) or (
    min(map(min, times.values())) <= 0
  )


def _promises(
  target: loading.Loaded, passes: cost.PassTimes, batch_size: int
) -> list[Promise]:
  """Those of all drafters that ship for the target, the best first.

  A drafter is loaded and timed only if it would pay if drafting were free.
  """
  found = []
  for name, shares in _cards(target).items():
    seconds = [0.0] * (len(shares) + 1)
    promised = promise(name, shares, passes, batch_size, seconds)
    if promised.speedup >= _MARGIN:
      loaded = drafter_files.load_drafter(name, target)
      seconds = _drafting_seconds(target, loaded, batch_size)
      promised = promise(name, shares, passes, batch_size, seconds)
    found.append(promised)
  return sorted(found, key=lambda x: -x.speedup)


def _cards(target: loading.Loaded) -> dict[str, list[float]]:
  """Shares of kept drafts, of the drafters that ship for a target."""
  found = {}
  for name, folder in sorted(drafter_card.shipped().items()):
    card: dict[str, Any] = drafter_card.read(files.at(folder))
    entries = [card[entry] for entry in _ACCEPTANCE if entry in card]
    if card['fingerprint'] == target.fingerprint and entries:
      shares = entries[0]['acceptance_by_position']
      found[name] = [float(x) for x in shares[: max(_SIZES) - 1]]
  return found


def _drafting_seconds(target, loaded, batch_size):
  def measure():
    params = {'target': target.params, 'drafter': loaded.params}
    seconds = pass_times.drafting(
      params,
      target.model,
      loaded.drafter,
      length=_CONTEXT,
      batch=batch_size,
      repeats=_REPEATS,
    )
    return {'draft': seconds}

  what = {'drafts': repr(loaded.drafter), 'batch': batch_size}
  times = _times(what, measure, lambda x: min(x['draft']) > 0)
  whole = max(0.0, min(times['draft']))
  num_draft_tokens = loaded.drafter.num_draft_tokens
  if not hasattr(loaded.drafter, 'go_on'):
    # All of them at once.
    return [0.0] + [whole] * num_draft_tokens
  step = whole / num_draft_tokens
  return [step * i for i in range(num_draft_tokens + 1)]


def _choice(target, *, length, costs, stores, trained, others) -> Choice:
  remembered = remembered_params = None
  if length:
    remembered = drafters.Suffix(
      num_draft_tokens=length, costs=costs[: length + 1]
    )
    remembered_params = {
      name.rpartition('/')[2]: store_files.load_store(name, target)
      for name in stores
    }
  drafter: Drafter = drafters.NoDraft()
  params = None
  if trained:
    loaded = drafter_files.load_drafter(
      trained.name, target, trained.num_draft_tokens
    )
    drafter, params = loaded.drafter, loaded.params
    fastest = policies.Fastest(costs=trained.costs, whole_batch=True)
    drafter = drafters.Adaptive(drafter=drafter, policies=(fastest,))
  if remembered and trained:
    drafter = drafters.Either(remembered=remembered, trained=drafter)
    params = {'remembered': remembered_params, 'trained': params}
  elif remembered:
    drafter, params = remembered, remembered_params
  return Choice(
    drafter=drafter,
    drafter_params=params,
    reason=_reason(length, costs, stores, trained, others),
  )


def _reason(length, costs, stores, trained, others) -> str:
  """One line for people."""
  short = lambda promise: promise.name.rpartition('/')[2]
  parts = []
  if length:
    whence = 'its own text and stored answers' if stores else 'its own text'
    parts.append(
      f'drafts up to {length} tokens from {whence} where that promises more '
      f'than the wider round costs ({costs[length]:.2f} of a plain pass here)'
    )
  if trained:
    parts.append(
      f'{"else" if parts else "drafts"} up to {trained.num_draft_tokens} with '
      f'{short(trained)}, which promises {trained.speedup:.2f}x'
    )
  elif not length:
    shortest = _REMEMBERED[0]
    parts.append(
      f'decodes plainly: a round of {shortest} drafts costs '
      f'{costs[shortest]:.2f} of a plain pass here'
    )
  chosen = ', '.join(parts)
  if trained or not others:
    return chosen
  return (
    f'{chosen}; trained drafters do not pay (the best, {short(others[0])}, '
    f'promises {others[0].speedup:.2f}x)'
  )
