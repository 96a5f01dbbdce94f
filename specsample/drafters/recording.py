"""A drafter that records what the target computed, to learn from it.

Online Speculative Decoding (Liu et al., 2310.07177) keeps the positions where
drafts were rejected between two updates of its draft model. The update itself
is in `training.online`.
"""

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import settings
from specsample import sharding
from specsample import types
from specsample.drafters import wrapper
from specsample.models import cache
from specsample.types import Array, DrafterState, Model


@types.pytree
class Recorded:
  """The target's outputs at the tokens of each row, and where to learn.

  They are what a training objective needs of the target: its distribution
  follows from the hidden vectors.
  """

  # [B, S, (1 + n) * D], the hidden vector of each token and then the n features
  # that the drafter reads; 0 where it was NaN or infinite.
  outputs: Array
  learned: Array  # [B, S] bool, tokens whose successor is to be learned
  length: Array  # [B] int32, tokens that the target has read

  def emptied(self) -> 'Recorded':
    """Returns the same record with nothing to learn."""
    nothing = jnp.zeros_like(self.learned)
    return dataclasses.replace(self, learned=nothing)


@types.pytree
class RecordingState:
  """The wrapped drafter's state, the record, and which nodes have children."""

  inner: DrafterState
  recorded: Recorded
  goes_on: Array  # [B, N + 1] bool, whether a draft follows each node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording(wrapper.Wrapper):
  """A drafter that drafts as `drafter` does and records the target's outputs.

  Wrap it around a `drafters.Adaptive`, not the other way round: drafts that a
  filter cut were not rejected. The target's pass then has a single width.

  The record takes S * (1 + n) * D numbers per row, with n = the number of
  `feature_layers`. A row that is refilled starts with that of its prefill.

  Attributes:
    drafter: the wrapped drafter, of chains or trees.
    model: the target.
    rejected_only: learn only positions at which a draft was rejected, as in
      the paper; False learns all positions at which a token was emitted. (A
      row's limit cuts its last draft, and the part cut off counts as rejected.)
  """

  drafter: Annotated[Any, checks.is_drafter]
  model: Model
  rejected_only: settings.Flag = True

  def _check(self):
    checks.model(self.model)
    if any(isinstance(x, types.KeysAndValues) for x in self.feature_layers):
      raise ValueError(
        f"drafter is {type(self.drafter).__name__}, which reads the target's "
        'keys and values, but only vectors of its layers can be recorded: '
        'record with another drafter'
      )

  @property
  def can_pause(self) -> bool:
    return False

  def init(self, params, batch_size, max_length):
    table = lambda dtype, *sizes: sharding.zeros(
      (batch_size, *sizes), dtype, 'batch', *[None] * len(sizes)
    )
    width = (1 + len(self.feature_layers)) * self.model.dim
    return RecordingState(
      inner=self.drafter.init(params, batch_size, max_length),
      recorded=Recorded(
        outputs=table(self.model.dtype, max_length, width),
        learned=table(bool, max_length),
        length=table(jnp.int32),
      ),
      goes_on=table(bool, self.num_draft_tokens + 1),
    )

  def propose(self, params, draw, warp, tokens, length, state):
    draft, inner = self.drafter.propose(
      params, draw, warp, tokens, length, state.inner
    )
    num_drafts = draft.tokens.shape[1]
    parents = draft.parents
    if parents is None:
      parents = jnp.arange(num_drafts)[None]
    is_behind = parents[..., None] == jnp.arange(num_drafts + 1)
    is_drafted = (draft.tokens >= 0)[..., None]
    return draft, dataclasses.replace(
      state,
      inner=inner,
      goes_on=jnp.any(is_behind & is_drafted, axis=1),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    inner = self.drafter.observe(
      params, tokens, count, output, verdict, state.inner
    )
    found = jnp.concatenate([output.hidden, *output.features], axis=-1)
    place = jnp.arange(found.shape[1])
    stays = place < count[:, None]
    is_number = jnp.isfinite(found)
    learned = stays & jnp.all(is_number, axis=-1)
    if verdict is None:
      learned = jnp.zeros_like(learned)
    elif self.rejected_only:
      # A stop among the kept drafts ends the round without another token.
      is_last = place == verdict.num_accepted[:, None]
      learned &= is_last & _goes_on(verdict, state)
    recorded = state.recorded
    write = lambda old, new: cache.write(old, new, recorded.length)
    outputs = jnp.where(stays[..., None] & is_number, found, 0)
    return dataclasses.replace(
      state,
      inner=inner,
      recorded=Recorded(
        outputs=write(recorded.outputs, outputs),
        learned=write(recorded.learned, learned),
        length=recorded.length + count,
      ),
    )


def _goes_on(verdict, state):
  """Returns whether a draft followed the kept ones, [B, 1]: it was rejected."""
  node = verdict.num_accepted[:, None]
  if verdict.path is not None:
    nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)))
    node = indexing.at(nodes, node)
  return indexing.at(state.goes_on, node)
