"""Drafts with another drafter as much as policies think worth verifying."""

from collections.abc import Sequence
import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from specsample import drafts
from specsample import sharding
from specsample import types
from specsample import widths as widths_lib
from specsample.drafters import branching
from specsample.drafters import pausable
from specsample.drafters import sequential
from specsample.policies import decision
from specsample.policies import fastest
from specsample.policies import policy as policy_lib
from specsample.types import Array

_logger = logging.getLogger(__name__)


@types.pytree
class AdaptiveState:
  """The drafter's own state, and those of the policies."""

  inner: types.DrafterState
  policies: tuple[policy_lib.State, ...]  # leaves [B, ...]
  # [B] int32, drafts of the round, of a tree how deep; -1 while it is paused.
  drafted: Array
  length: Array  # [B] int32, tokens before the round
  over: Array  # [B] bool, rows that emit nothing any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive(branching.OverBranches):
  """A drafter whose drafts are cut where a policy says so, row by row.

  The rows begin with what params['policies'] holds, if it is there: what
  `learned` returned after other prompts. Then policies need not begin anew, and
  a row's number of drafts follows from those prompts too; its distribution does
  not, nor under temperature 0 its tokens.

  In one executable: K is the most that is ever drafted. Where no row wants a
  draft the drafter is left out, one that draws token by token stops with the
  last row, and the target reads no more than the first of the `widths` that
  holds all drafts. A policy that asks for more than K gets K.

  Attributes:
    drafter: a `pausable.Pausable`.
    policies: all of them must let a draft pass.
    widths: numbers of drafts for which the target's pass is compiled, rising;
      K is added. None for 0 and K, and of chains for those between that a
      `Fastest` policy's costs call at least 5% cheaper than the next. With such
      a policy 0 is among them. Empty for K alone, where only masks tell that
      drafts are cut.
  """

  drafter: Any
  policies: Sequence[policy_lib.Policy]
  widths: Sequence[int] | None = None

  def __post_init__(self):
    """Refuses no policy, widths that do not fit, drafters that cannot pause."""
    if hasattr(self.drafter, 'untaught'):
      raise ValueError(
        f'the drafter is an {type(self.drafter).__name__}, which has policies '
        'already: give it all policies at once'
      )
    pausable.check(self.drafter)
    object.__setattr__(self, 'policies', tuple(self.policies))
    if not self.policies:
      raise ValueError('policies is empty: name one, or leave Adaptive out')
    most = self.num_draft_tokens
    widths = self._ladder() if self.widths is None else tuple(self.widths)
    if widths != tuple(sorted(set(widths) & set(range(most + 1)))):
      raise ValueError(
        f'widths are {widths}: give rising numbers of drafts, from 0 to {most}'
      )
    weighs = any(isinstance(x, fastest.Fastest) for x in self.policies)
    if widths and widths[0] and weighs:
      raise ValueError(
        f'widths are {widths}, and Fastest takes a round without drafts for a '
        'plain pass: begin with 0'
      )
    if most not in widths:
      widths += (most,)
    object.__setattr__(self, 'widths', widths)
    for policy in self.policies:
      if policy.most is not None and policy.most > self.depth:
        _say_clamped(type(policy).__name__, policy.most, self.depth)

  @property
  def num_draft_tokens(self) -> int:
    """N."""
    return self.drafter.num_draft_tokens

  @property
  def depth(self) -> int:
    """The most drafts that a round keeps: of a chain all."""
    return getattr(self.drafter, 'depth', self.num_draft_tokens)

  @property
  def topology(self) -> Any:
    """Of a `Tree` its own, None of other drafters; cut nodes are in it."""
    return getattr(self.drafter, 'topology', None)

  def _ladder(self) -> tuple[int, ...]:
    """The numbers of drafts that are worth a pass of their own."""
    most = self.num_draft_tokens
    timed = (x.costs for x in self.policies if isinstance(x, fastest.Fastest))
    # Of a tree they are the costs of its levels.
    costs = next(timed, ()) if self.depth == most else ()
    return widths_lib.ladder(costs, most)

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""

    def for_all(x):
      rows = jnp.broadcast_to(x, (batch_size, *jnp.shape(x)))
      return sharding.constrain(rows, 'batch', *[None] * jnp.ndim(x))

    first = self.untaught()
    states = params.get('policies', first)
    structure: Any = jax.tree.structure(first)
    if structure != jax.tree.structure(states):
      names = [type(policy).__name__ for policy in self.policies]
      raise ValueError(
        "params['policies'] is not what policies like these have learned "
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
    """What the policies know before the first prompt."""
    return tuple(policy.init(self.depth) for policy in self.policies)

  def learned(self, state: AdaptiveState) -> tuple[policy_lib.State, ...]:
    """What the policies know at the end of some rows: the mean of them.

    Args:
      state: `DecodeState.draft` of the rows.
    """
    mean = lambda x: jnp.mean(x, axis=0).astype(x.dtype)
    return jax.tree.map(mean, state.policies)

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`."""
    inner = self.drafter.extend(params, tokens, count, output, state.inner)
    return dataclasses.replace(state, inner=inner)

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`."""
    wanted = decision.wanted(
      self.policies, state.policies, state.over, self.depth
    )
    # Nobody waits for the drafts of a row that is done.
    wanted = jnp.where(state.over, 0, wanted)
    decide = functools.partial(
      decision.decide, self.policies, state.policies, wanted
    )

    def ask(inner):
      inner = self.drafter.resume(params, tokens, length, inner)
      if not hasattr(self.drafter, 'go_on'):
        draft, inner = self.drafter.propose(
          params, draw, warp, tokens, length, inner
        )
        keep, _ = decide(draft)
        return drafts.cut(draft, keep), inner
      return sequential.propose_while(
        decide,
        *(draw, warp, tokens, length, inner),
        drafter=self.drafter,
        params=params,
      )

    def leave_out(inner):
      draft, _ = jax.eval_shape(ask, inner)
      return _nothing(draft), self.drafter.pause(params, tokens, length, inner)

    draft, inner = jax.lax.cond(
      jnp.any(wanted > 0), ask, leave_out, state.inner
    )
    return draft, dataclasses.replace(
      state, inner=inner, drafted=drafts.depth(draft), length=length
    )

  def pause(self, params, tokens, length, state):
    """See `pausable.Pausable`; policies learn nothing of such a round."""
    inner = self.drafter.pause(params, tokens, length, state.inner)
    drafted = jnp.full_like(state.drafted, -1)
    return dataclasses.replace(
      state, inner=inner, drafted=drafted, length=length
    )

  def resume(self, params, tokens, length, state):
    """See `pausable.Pausable`."""
    inner = self.drafter.resume(params, tokens, length, state.inner)
    # A row that was done may go on with more text.
    over = jnp.zeros_like(state.over)
    return dataclasses.replace(state, inner=inner, over=over)

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`."""
    # A round emits a token of every row that is not done.
    over = length == state.length
    drafted = jnp.maximum(state.drafted, 0)
    learned = decision.update(
      self.policies, state.policies, drafted, verdict.num_accepted, state.over
    )
    learns_nothing = (state.drafted < 0) | over
    policies = jax.tree.map(
      lambda old, new: jnp.where(
        learns_nothing.reshape(-1, *(1,) * (new.ndim - 1)), old, new
      ),
      state.policies,
      learned,
    )
    inner = self.drafter.update(
      params, tokens, length, output, verdict, state.inner
    )
    return dataclasses.replace(
      state,
      inner=inner,
      policies=policies,
      over=over,
    )


def _nothing(like):
  """A draft of nothing, with the shapes of another."""
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like
  )
  return dataclasses.replace(zeros, tokens=zeros.tokens - 1)


@functools.cache
def _say_clamped(name: str, most: int, depth: int) -> None:
  """Once for each."""
  _logger.warning(
    '%s asks for up to %d drafts a round, and the drafter drafts %d: it gets '
    'as many',
    name,
    most,
    depth,
  )
