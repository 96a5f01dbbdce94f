"""A drafter that drafts only as much as its policies find worth verifying."""

from collections.abc import Sequence
import dataclasses
import functools
import logging
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import drafts
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample import widths as widths_lib
from specsample.drafters import wrapper
from specsample.policies import budget
from specsample.policies import decision
from specsample.policies import fastest
from specsample.policies import policy as policy_lib
from specsample.types import Array

_logger = logging.getLogger(__name__)


@types.pytree
class AdaptiveState:
  """The drafter's own state and the policies' states."""

  inner: types.DrafterState
  policies: tuple[policy_lib.State, ...]  # leaves [B, ...]
  # [B] int32, drafts of the round, for a tree its depth; -1 while it is paused.
  drafted: Array
  length: Array  # [B] int32, tokens before the round
  over: Array  # [B] bool, rows that emit no more tokens


def check_pauses(name: str, value: Any) -> None:
  """Raises ValueError unless a setting is a drafter that can sit out rounds."""
  checks.is_drafter(name, value)
  if not value.can_pause:
    raise ValueError(
      f'{name} is {type(value).__name__}, which cannot sit out a round: '
      'give a drafter whose can_pause is True'
    )


_Policies = Annotated[
  Sequence[policy_lib.Policy],
  settings.rule(
    lambda x: (
      isinstance(x, tuple)
      and bool(x)
      and all(isinstance(policy, policy_lib.Policy) for policy in x)
    ),
    'a tuple of policies, such as (policies.SVIP(0.5),), or leave Adaptive out',
  ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(wrapper.Wrapper):
  """A drafter that cuts another drafter's drafts, row by row, as policies say.

  Rows start from params['policies'] if it is given: the states that `learned`
  returned after other prompts, so that policies need not start from scratch.
  The number of drafts in a row then depends on those prompts too; the row's
  distribution does not, as long as they were decoded with another key or other
  request ids, and neither do its tokens at temperature 0.

  There is a single executable, and K is the most that is ever drafted. If no
  row wants a draft, the drafter does not run. A drafter that draws token by
  token stops when no row wants more, and the target reads no more than the
  first of the `widths` that holds all drafts. A policy that asks for more than
  K gets K.

  Attributes:
    drafter: a drafter whose `can_pause` is set, as it is for most.
    policies: a draft has to pass all of them.
    widths: numbers of drafts for which the target's pass is compiled, rising;
      K is added. None means the ladder of a `Budget` policy, or 0, K and, for
      chains, each number in between that is at least 5% cheaper than the next
      by the costs of a `Fastest` policy. With either policy they begin with 0.
      Empty means K alone: drafts that are cut are then only masked.
  """

  drafter: Annotated[Any, check_pauses]
  policies: _Policies
  # None becomes a tuple in `_check`.
  widths: Sequence[int] | None = None  # type: ignore[assignment]

  def _check(self):
    if self.drafter.policies:
      raise ValueError(
        f'drafter is an {type(self.drafter).__name__}, which already has '
        'policies: pass all policies to one Adaptive'
      )
    most = self.num_draft_tokens
    widths = self._ladder() if self.widths is None else self.widths
    if widths != tuple(sorted(set(widths) & set(range(most + 1)))):
      what = 'the ladder is' if self.widths is None else 'widths are'
      raise ValueError(
        f'{what} {widths}: give increasing numbers of draft tokens, from 0 to '
        f'{most}'
      )
    weighs = (budget.Budget, fastest.Fastest)
    of_costs = [x for x in self.policies if isinstance(x, weighs)]
    if of_costs and widths[:1] != (0,):
      raise ValueError(
        f'widths are {widths}, but {type(of_costs[0]).__name__} counts a round '
        'without drafts as a plain pass: begin with 0'
      )
    if most not in widths:
      widths += (most,)
    object.__setattr__(self, 'widths', widths)
    for policy in self.policies:
      if policy.most is not None and policy.most > self.depth:
        _warn_once(
          f'{type(policy).__name__} asks for up to {policy.most} draft tokens '
          f'per round, but the drafter drafts {self.depth}: it gets as many'
        )

  def _ladder(self) -> tuple[int, ...]:
    """Returns the numbers of drafts that are worth a pass of their own."""
    most = self.num_draft_tokens
    for policy in self.policies:
      if isinstance(policy, budget.Budget):
        return tuple(policy.ladder)
    timed = (x.costs for x in self.policies if isinstance(x, fastest.Fastest))
    # A tree's costs are those of its levels, not of its numbers of nodes.
    costs = next(timed, ()) if self.depth == most else ()
    return widths_lib.ladder(costs, most)

  def init(self, params, batch_size, max_length):
    def for_all(x):
      rows = jnp.broadcast_to(x, (batch_size, *jnp.shape(x)))
      return sharding.constrain(rows, 'batch', *[None] * jnp.ndim(x))

    first = self.untaught()
    states = params.get('policies', first)
    structure: Any = jax.tree.structure(first)
    if structure != jax.tree.structure(states):
      names = [type(policy).__name__ for policy in self.policies]
      raise ValueError(
        "params['policies'] does not fit the policies "
        f'({", ".join(names)}): give what `learned` returned, or leave it out'
      )
    return AdaptiveState(
      inner=self.drafter.init(params, batch_size, max_length),
      policies=jax.tree.map(for_all, states),
      drafted=sharding.zeros((batch_size,), jnp.int32, 'batch'),
      length=sharding.zeros((batch_size,), jnp.int32, 'batch'),
      over=sharding.zeros((batch_size,), bool, 'batch'),
    )

  def untaught(self) -> tuple[policy_lib.State, ...]:
    """Returns the policies' states before the first prompt."""
    return tuple(policy.init(self.depth) for policy in self.policies)

  def learned(self, state: AdaptiveState) -> tuple[policy_lib.State, ...]:
    """Returns the mean of the policies' states at the end of some rows.

    Args:
      state: `DecodeState.draft` of the rows.
    """
    mean = lambda x: jnp.mean(x, axis=0).astype(x.dtype)
    return jax.tree.map(mean, state.policies)

  def propose(self, params, draw, warp, tokens, length, state):
    wanted = decision.wanted(
      self.policies, state.policies, state.over, self.depth
    )
    # A row that is done needs no drafts.
    wanted = jnp.where(state.over, 0, wanted)
    decide = functools.partial(
      decision.decide, self.policies, state.policies, wanted, state.over
    )

    def ask(inner):
      inner = self.drafter.resume(params, tokens, length, inner)
      arguments = params, draw, warp, tokens, length, inner
      if self.drafter.stops_early:
        draft, inner = self.drafter.propose_while(*arguments, goes_on=decide)
      else:
        draft, inner = self.drafter.propose(*arguments)
        keep, _ = decide(draft)
        draft = drafts.cut(draft, keep)
      noted = decision.note(self.policies, state.policies, draft)
      return draft, noted, inner

    def leave_out(inner):
      draft, _, _ = jax.eval_shape(ask, inner)
      inner = self.drafter.pause(params, tokens, length, inner)
      return _nothing(draft), state.policies, inner

    draft, noted, inner = jax.lax.cond(
      jnp.any(wanted > 0), ask, leave_out, state.inner
    )
    return draft, dataclasses.replace(
      state,
      inner=inner,
      policies=noted,
      drafted=drafts.depth(draft),
      length=length,
    )

  def pause(self, params, tokens, length, state):
    """See `Drafter`; policies learn nothing from such a round."""
    inner = self.drafter.pause(params, tokens, length, state.inner)
    drafted = jnp.full_like(state.drafted, -1)
    return dataclasses.replace(
      state, inner=inner, drafted=drafted, length=length
    )

  def resume(self, params, tokens, length, state):
    inner = self.drafter.resume(params, tokens, length, state.inner)
    # A row that was done may continue with more text.
    over = jnp.zeros_like(state.over)
    return dataclasses.replace(state, inner=inner, over=over)

  def observe(self, params, tokens, count, output, verdict, state):
    inner = self.drafter.observe(
      params, tokens, count, output, verdict, state.inner
    )
    if verdict is None:
      return dataclasses.replace(state, inner=inner)
    # A round emits at least one token in every row that is not done.
    over = count == 0
    drafted = jnp.maximum(state.drafted, 0)
    # If this drafter drafted nothing, another one's draft may have been kept.
    kept = jnp.minimum(verdict.num_accepted, drafted)
    learned = decision.update(
      self.policies, state.policies, drafted, kept, state.over
    )
    learns_nothing = (state.drafted < 0) | over
    policies = indexing.where(learns_nothing, state.policies, learned)
    return dataclasses.replace(state, inner=inner, policies=policies, over=over)


def _nothing(like):
  """Returns an empty draft with the shapes of another."""
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like
  )
  return dataclasses.replace(zeros, tokens=zeros.tokens - 1)


@functools.cache
def _warn_once(message: str) -> None:
  _logger.warning(message)
