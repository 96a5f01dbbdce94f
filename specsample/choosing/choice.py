"""Choosing how to decode a target on the machine at hand.

A drafter's card says how much its drafts gain, and the cost of a pass is
measured here, once. If drafting does not pay off, the choice is plain decoding.
"""

import dataclasses
import os
from typing import Any

from specsample import checks
from specsample import cost
from specsample import drafters
from specsample import files
from specsample import policies
from specsample import verify as verify_lib
from specsample.choosing import estimates
from specsample.choosing import round_costs
from specsample.drafter import Drafter
from specsample.loading import card as card_lib
from specsample.loading import drafter as drafter_lib
from specsample.loading import load
from specsample.loading import store_files
from specsample.types import Params, Verifier

# Lengths of lookup drafts, the share of rounds in which a row drafts, and the
# acceptance rate of those drafts, as measured on 80 questions.
_REMEMBERED = (3, 7, 15)
_REMEMBERED_SHARE = 0.45
_REMEMBERED_ACCEPTANCE = 0.65
# The least speedup that a trained drafter must promise, so that texts on which
# less is kept lose nothing. With rates on people's questions 80 other questions
# gave what was promised: 1.62x, or 1.40x with the prefill, a quarter of
# autoregressive decoding (greedy, 2026-11-29).
_MARGIN = 1.1


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
  """How to decode, and why.

  Attributes:
    drafter: drafts at most as many tokens as pay off here; `drafters.NoDraft`
      if none do.
    verify: the rule for its drafts.
    drafter_params: the drafter's own parameters, None if it has none.
    reason: one line that says what was chosen, and why.
  """

  drafter: Drafter
  reason: str
  verify: Verifier = verify_lib.chain
  drafter_params: Params = None

  def params(self, target: load.Loaded) -> Params:
    """Returns the tree that `generate` takes, with the target's parameters."""
    params = {'target': target.params}
    if self.drafter_params is None:
      return params
    return params | {'drafter': self.drafter_params}


def auto(
  target: load.Loaded,
  *,
  batch_size: int = 1,
  drafter: str | os.PathLike[str] | None = None,
) -> Choice:
  """Chooses the drafter that pays off most for a target on this machine.

  Considers remembered drafts (from the row's own text and the stores that ship
  for the target) and the trained drafters that ship for it: as chains and, if
  the card says how often a second choice is kept or what trees of a lattice
  emit, as trees. Passes over 1 to 16 tokens, and the drafters that may pay off,
  are timed once per machine, and the times are kept (`measured_here`).
  `drafters.Suffix` drafts where it expects to gain more than the wider round
  costs, and a trained drafter drafts as long as `policies.Fastest` finds that
  it pays off in the batch. Both decide from the past alone, so the output stays
  exact. The trees of a lattice are as wide as `policies.Budget` finds; it reads
  the drafts, which is exact because they are point masses.

  Args:
    target: the model to decode with.
    batch_size: number of rows that are decoded at once.
    drafter: a trained drafter, as `load_drafter` takes it, for which only the
      number of drafts or the tree is chosen; None to choose among all.

  Raises:
    ValueError: batch_size is not a positive integer, or the drafter is not for
      this target, or its card does not say how many of its drafts are kept.
  """
  checks.instance(
    'target', target, load.Loaded, 'give what specsample.load returned'
  )
  batch_size = round_costs.rows(batch_size)
  seconds = round_costs.pass_seconds(target, batch_size)
  if round_costs.is_uneven(seconds):
    low, high = 1e3 * min(map(min, seconds.values())), 1e3 * max(seconds['1'])
    return Choice(
      drafter=drafters.NoDraft(),
      reason=f'decodes plainly: a pass took {low:.3g} to {high:.3g} ms, which '
      'is too uneven to tell what pays off; try again on a quiet machine',
    )
  passes = round_costs.pass_times_of(seconds)
  length, stores = 0, []
  if drafter is not None:
    found = [_of_drafter(drafter, target, passes, batch_size)]
    if found[0].speedup <= 1:
      return Choice(
        drafter=drafters.NoDraft(),
        reason=f'decodes plainly: {_short(found[0])} promises '
        f'{found[0].speedup:.2f}x here',
      )
    best: estimates.Estimate | None = found[0]
  else:
    length = remembered_length(passes, batch_size)
    stores = sorted(
      name
      for name, folder in card_lib.shipped(store_files.NAME).items()
      if files.read_json(files.at(folder / store_files.NAME)).get('target')
      == target.fingerprint
    )
    best, found = _best_shipped(target, passes, batch_size)
  # Looking up remembered drafts takes no time.
  free = estimates.PartTimes(passes, [0.0] * (1 + max(_REMEMBERED)))
  return _choice(
    target,
    length=length,
    costs=free.costs(),
    stores=stores,
    trained=best,
    others=found,
  )


def remembered_length(passes: cost.PassTimes, batch_size: int) -> int:
  """Returns the best length of remembered drafts, 0 if none would pay off.

  A round of several rows is as wide as the longest of their drafts.

  Args:
    passes: t(n), of the target's pass over n tokens of each row.
    batch_size: number of rows.
  """
  wide = 1 - (1 - _REMEMBERED_SHARE) ** batch_size

  def speedup(length):
    kept = cost.expected_tokens(_REMEMBERED_ACCEPTANCE, length) - 1
    more = passes(1 + length) / passes(1) - 1
    return (1 + _REMEMBERED_SHARE * kept) / (1 + wide * more)

  return max((0, *_REMEMBERED), key=speedup)


def _best_shipped(
  target: load.Loaded, passes: cost.PassTimes, batch_size: int
) -> tuple[estimates.Estimate | None, list[estimates.Estimate]]:
  """Chooses one of the drafters that ship for the target.

  A drafter is loaded and timed only if, with free drafting, it would pay off
  and gain more than the drafters timed before it.

  Args:
    target: the model to decode with.
    passes: t(n), of its pass over n tokens of each row.
    batch_size: number of rows.

  Returns:
    The estimate of the fastest drafter that pays off, None if there is none;
    and those of all drafters, the best of those that were timed first.
  """
  gain = lambda estimate: estimate.speedup
  cards = _cards(target)
  free = [_estimate(*card, passes, None) for card in cards.items()]
  best, timed, others = None, [], []
  for estimate in sorted(free, key=gain, reverse=True):
    is_timed = estimate.speedup >= _MARGIN
    if best is not None:
      is_timed &= estimate.speedup > best.speedup
    if not is_timed:
      others.append(estimate)
      continue
    name = estimate.name
    loaded = drafter_lib.load_drafter(name, target)
    estimate = _timed(name, loaded, cards[name], target, passes, batch_size)
    if estimate.speedup >= _MARGIN:
      best = max(best or estimate, estimate, key=gain)
    timed.append(estimate)
  return best, sorted(timed, key=gain, reverse=True) + others


def _of_drafter(
  name_or_path: str | os.PathLike[str],
  target: load.Loaded,
  passes: cost.PassTimes,
  batch_size: int,
) -> estimates.Estimate:
  """Returns the estimate of one drafter; see `auto`."""
  name = files.name_of(name_or_path)
  loaded = drafter_lib.load_drafter(name, target)
  measured = card_lib.measured(loaded.card)
  if measured is None:
    raise ValueError(
      f'the card of {name} does not say how many of its drafts are kept (entry '
      f'{" or ".join(map(repr, card_lib.MEASURED))}): train it with '
      'experiments.train, which measures that, or choose the number of drafts '
      'with load_drafter'
    )
  return _timed(name, loaded, measured, target, passes, batch_size)


def _timed(name, loaded, measured, target, passes, batch_size):
  """Returns the best estimate of a drafter by its own times."""
  of_drafter = loaded.drafter, loaded.params
  seconds = round_costs.drafting_seconds(target, *of_drafter, batch_size)
  given = name, measured, passes, seconds
  estimate = _estimate(*given)
  if estimate.num_nodes is None or estimate.speedup <= 1:
    return estimate
  # Whole rounds of trees may take longer than their parts do.
  trees = _trees(loaded, estimate)
  budget = round_costs.budget(
    target, trees, loaded.params, batch_size=batch_size
  )
  return _estimate(*given, budget)


def _trees(loaded, estimate):
  return drafters.LatticeTree(
    drafter=loaded.drafter, num_draft_tokens=estimate.num_nodes
  )


def _estimate(name, measured, passes, seconds, budget=None):
  """Returns the best estimate of a chain and, if the card allows it, of trees.

  Drafting a level of a tree is taken to be as fast as a token of a chain.
  """
  most = max(round_costs.SIZES) - 1
  shares = list(measured['acceptance_by_position'][:most])
  if None in shares:  # positions that were never drafted
    shares = shares[: shares.index(None)]
  if seconds is None:
    seconds = [0.0] * (len(shares) + 1)
  # Passes over more tokens were not timed.
  times = estimates.PartTimes(passes, seconds[: len(shares) + 1])
  found = [estimates.of_chain(name, shares, times)]
  if by_rank := measured.get('acceptance_by_rank'):
    by_rank = by_rank[: len(times.drafting) - 1]
    found.append(estimates.of_trees(name, by_rank, times, most))
  by_nodes = measured.get('tokens_by_nodes', {})
  if by_nodes := {n: x for n, x in by_nodes.items() if int(n) <= most}:
    found.append(estimates.of_lattice(name, by_nodes, times, budget))
  return max(found, key=lambda estimate: estimate.speedup)


def _cards(target: load.Loaded) -> dict[str, dict[str, Any]]:
  """Returns what `card.measured` does, for the drafters of a target."""
  found = {}
  for name, folder in sorted(card_lib.shipped().items()):
    card: dict[str, Any] = card_lib.read(files.at(folder))
    measured = card_lib.measured(card)
    if card['fingerprint'] == target.fingerprint and measured is not None:
      found[name] = measured
  return found


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
  verify: Verifier = verify_lib.chain
  if trained:
    drafter, verify, params = _adaptive(target, trained)
  if remembered and trained:
    drafter = drafters.Either(remembered=remembered, trained=drafter)
    params = {'remembered': remembered_params, 'trained': params}
  elif remembered:
    drafter, params = remembered, remembered_params
  return Choice(
    drafter=drafter,
    verify=verify,
    drafter_params=params,
    reason=_reason(length, costs, stores, trained, others),
  )


def _adaptive(
  target: load.Loaded, estimate: estimates.Estimate
) -> tuple[Drafter, Verifier, Params]:
  """Returns a trained drafter that drafts as much as pays, and its rule."""
  if estimate.budget is not None:
    loaded = drafter_lib.load_drafter(estimate.name, target)
    trees = _trees(loaded, estimate)
    drafter = drafters.Adaptive(drafter=trees, policies=(estimate.budget,))
    return drafter, verify_lib.tree, loaded.params
  loaded = drafter_lib.load_drafter(estimate.name, target, estimate.depth)
  inner: Drafter = loaded.drafter
  verify: Verifier = verify_lib.chain
  if estimate.topology is not None:
    inner = drafters.Tree(drafter=inner, topology=estimate.topology)
    verify = verify_lib.tree
  fastest = policies.Fastest(costs=estimate.costs, whole_batch=True)
  drafter = drafters.Adaptive(drafter=inner, policies=(fastest,))
  return drafter, verify, loaded.params


def _reason(length, costs, stores, trained, others) -> str:
  """Returns the reason for the choice, in one line for people."""
  parts = []
  if length:
    whence = 'its own text and stored answers' if stores else 'its own text'
    parts.append(
      f'drafts up to {length} tokens from {whence} where that promises more '
      f'than the wider round costs ({costs[length]:.2f} plain passes here)'
    )
  if trained:
    how = f'up to {trained.depth}'
    if trained.topology is not None:
      how = f'trees of {trained.topology.num_nodes} tokens, {how} deep,'
    if trained.num_nodes is not None:
      how = f'trees of up to {trained.num_nodes} tokens, as wide as pays,'
    parts.append(
      f'{"otherwise" if parts else "drafts"} {how} with {_short(trained)}, '
      f'which promises {trained.speedup:.2f}x'
    )
  elif not length:
    shortest = _REMEMBERED[0]
    parts.append(
      f'decodes plainly: a round of {shortest} draft tokens costs '
      f'{costs[shortest]:.2f} plain passes here'
    )
  chosen = ', '.join(parts)
  if trained or not others:
    return chosen
  return (
    f'{chosen}; trained drafters do not pay off (the best, '
    f'{_short(others[0])}, promises {others[0].speedup:.2f}x)'
  )


def _short(estimate):
  return estimate.name.rpartition('/')[2]
