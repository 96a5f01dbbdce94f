"""Methods that draft from memory, and the texts that are remembered."""

from collections.abc import Mapping, Sequence
import dataclasses

import gin

from experiments import methods
import specsample
from specsample import drafters
from specsample import policies as policies_lib
from specsample.choosing import round_costs
from specsample.policies import policy as policy_lib


@gin.configurable
def stores(
  target: specsample.Loaded, names: Sequence[str]
) -> dict[str, specsample.store.Store]:
  """Loads stores by their names or folders, as `specsample.load_store` does."""
  return {name: specsample.load_store(name, target) for name in names}


@gin.configurable
def suffix(
  drafter: drafters.Suffix,
  stores: Mapping[str, specsample.store.Store] | None = None,
  target: specsample.Loaded | None = None,
  batch_size: int = 1,
) -> methods.Method:
  """Returns the method of a `Suffix` that searches stores, given by name.

  With a target, the cost of its passes over `batch_size` rows on this machine
  decides when to draft, instead of the drafter's `min_kept`. The drafter's K is
  the most that is ever drafted.
  """
  params = dict(stores or {})
  if target is None:
    return methods.Method(drafter, params=params)
  costs = round_costs.costs(
    target, drafter.num_draft_tokens, batch_size=batch_size
  )
  make = lambda number, batch_size: suffix(
    dataclasses.replace(drafter, num_draft_tokens=number),
    params,
    target,
    batch_size,
  )
  return methods.Method(
    dataclasses.replace(drafter, costs=costs), params=params, make=make
  )


@gin.configurable
def either(
  remembered: methods.Method,
  trained: methods.Method,
  target: specsample.Loaded | None = None,
  policies: Sequence[policy_lib.Policy] = (),
  batch_size: int = 1,
) -> methods.Method:
  """Returns the method of `drafters.Either`.

  Args:
    remembered: the method of a `Suffix`.
    trained: its drafter drafts if the remembered draft promises less, and its
      rule verifies.
    target: if given, `policies.Fastest`, with the costs of rounds on this
      machine, decides how much the trained drafter drafts.
    policies: further policies, all of which a trained draft must pass as well;
      see `drafters.Adaptive`.
    batch_size: the rows of these rounds.
  """
  remembered = methods.remake(remembered, batch_size=batch_size)
  trained = methods.remake(trained, batch_size=batch_size)
  every = (*policies,)
  if target is not None:
    every = (_fastest(trained, target, batch_size), *policies)
  drafter = trained.drafter
  if every:
    drafter = drafters.Adaptive(drafter=drafter, policies=every)
  both = drafters.Either(remembered=remembered.drafter, trained=drafter)

  def make(num_draft_tokens, batch_size):
    reason = (
      'both drafters of Either have their own: bind those of Suffix and of the '
      'trained drafter'
    )
    methods.check_length(both, num_draft_tokens, reason)
    return either(remembered, trained, target, policies, batch_size)

  return methods.Method(
    drafter=both,
    verify=trained.verify,
    params={'remembered': remembered.params, 'trained': trained.params},
    make=make,
  )


def _fastest(trained, target, batch_size):
  costs = round_costs.costs(
    target,
    trained.drafter.num_draft_tokens,
    batch_size=batch_size,
    trained=specsample.LoadedDrafter(trained.drafter, trained.params, card={}),
  )
  depth = trained.drafter.depth
  if depth < trained.drafter.num_draft_tokens:
    # A tree is drafted and verified as a whole, however deep it is kept.
    costs = (costs[0], *[costs[-1]] * depth)
  return policies_lib.Fastest(costs=costs, whole_batch=True)


@gin.configurable
def target(loaded: specsample.Loaded) -> specsample.Loaded:
  """Returns the target whose answers are to be remembered."""
  return loaded
