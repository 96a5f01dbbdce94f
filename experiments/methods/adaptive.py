"""Methods whose drafts are filtered, or as long as a policy says."""

from collections.abc import Sequence
import dataclasses

import gin
import jax

from experiments import methods
import specsample
from specsample import choosing
from specsample import drafters
from specsample import policies as policies_lib
from specsample.policies import policy as policy_lib

# Lets a binding name them: Fastest.costs = (1.0, 1.1, 1.3).
for _policy in policies_lib.__all__:
  gin.external_configurable(
    getattr(policies_lib, _policy), module='specsample.policies'
  )


@gin.configurable
def adaptive(
  method: methods.Method,
  policies: Sequence[policy_lib.Policy],
  num_draft_tokens: int | None = None,
  widths: Sequence[int] | None = None,
) -> methods.Method:
  """Returns a method whose drafts policies cut; see `drafters.Adaptive`.

  A draft has to pass all policies. The most draft tokens are by default the
  method's own number, and the widths of the target's passes those of a
  `Budget`, or one for each number of drafts, and for a tree one for every power
  of two.
  """
  method = methods.remake(method, num_draft_tokens)
  has_ladder = any(isinstance(x, policies_lib.Budget) for x in policies)
  own = None if has_ladder else _widths(method.drafter)
  drafter = drafters.Adaptive(
    drafter=method.drafter,
    policies=policies,
    widths=own if widths is None else widths,
  )
  make = lambda *fit: adaptive(
    methods.remake(method, *fit), policies, None, widths
  )
  return dataclasses.replace(method, drafter=drafter, make=make)


def _widths(drafter):
  num_drafts = drafter.num_draft_tokens
  if drafter.depth == num_drafts:
    return range(num_drafts)
  return [0, *(2**i for i in range((num_drafts - 1).bit_length()))]


@gin.configurable
def budgeted(
  method: methods.Method, target: specsample.Loaded, batch_size: int = 1
) -> methods.Method:
  """Returns a method whose trees are as wide as they pay on this machine.

  Its drafter drafts trees of point masses. Whole rounds with the target, of
  `batch_size` rows, are timed.
  """
  budget = choosing.budget(
    target, method.drafter, method.params, batch_size=batch_size
  )
  drafter = drafters.Adaptive(drafter=method.drafter, policies=(budget,))
  make = lambda number, batch_size: budgeted(
    methods.remake(method, number), target, batch_size
  )
  return methods.Method(drafter, method.verify, method.params, make)


@gin.configurable
def contrary(method: methods.Method) -> methods.Method:
  """Returns a drafter's method that prefers the least likely tokens.

  Its last norm is negated, and so are its logits: the drafts cost as much as
  before and are never kept, which a policy has to cope with.
  """
  kinds = drafters.DraftModel | drafters.DFlash
  if not isinstance(method.drafter, kinds):
    raise ValueError(
      'contrary is for a draft model or a block drafter, but the drafter is '
      f'{type(method.drafter).__name__}: give the method of a DraftModel, '
      'DFlash or DSpark'
    )

  norm = jax.tree.map(lambda x: -x, method.params['norm'])
  return dataclasses.replace(
    method,
    params=method.params | {'norm': norm},
    make=lambda *fit: contrary(methods.remake(method, *fit)),
  )
