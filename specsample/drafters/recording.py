"""A drafter that records the target's law where drafts were rejected.

Online Speculative Decoding (Liu et al., 2310.07177) keeps this between two
updates of its draft model. The update itself is in `training.online`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specsample import checks
from specsample import indexing
from specsample import sharding
from specsample import types
from specsample.drafters import settings
from specsample.drafters import wrapper
from specsample.types import Array, DrafterState


@types.pytree
class Ring:
  """The target's law at the last M recorded positions of each row.

  Logits are the target's own, before warping.
  """

  position: Array  # [B, M] int32, index of the recorded token; -1 if empty
  ids: Array  # [B, M, k] int32, the most likely tokens
  logits: Array  # [B, M, k] float32, of those tokens
  log_sum_exp: Array  # [B, M] float32, over all V logits
  count: Array  # [B] int32, entries written; the next goes to count % M

  def emptied(self) -> 'Ring':
    """Returns the same ring with nothing in it."""
    return dataclasses.replace(self, position=jnp.full_like(self.position, -1))


@types.pytree
class RecordingState:
  """The wrapped drafter's state, the ring, and which nodes have children."""

  inner: DrafterState
  ring: Ring
  length: Array  # [B] int32, tokens before the round
  goes_on: Array  # [B, N + 1] bool, whether a draft follows each node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording(wrapper.Wrapper):
  """A drafter that drafts as `drafter` does and records the target's law.

  Wrap it around a `drafters.Adaptive`, not the other way round: drafts that a
  filter cut were not rejected. The target's pass then has a single width.

  Ring positions are indices into the row's tokens. A row that is refilled
  starts with the empty ring of its prefill.

  Attributes:
    drafter: the wrapped drafter, of chains or trees.
    num_positions: M; the ring keeps the last M positions.
    top_k: k, the number of logits that are kept per position.
    rejected_only: record only positions at which a draft was rejected, as in
      the paper; False records all positions at which a token was emitted. (A
      row's limit cuts its last draft, and the part cut off counts as rejected.)
  """

  drafter: Any  # a types.Drafter
  num_positions: int = 64
  top_k: int = 16
  rejected_only: bool = True

  def __post_init__(self):
    """Refuses a ring that holds nothing."""
    for name in ('num_positions', 'top_k'):
      value = getattr(self, name)
      if not checks.is_count(value):
        raise ValueError(f'{name} is {value!r}: record at least 1')
    settings.check_flag('rejected_only', self.rejected_only)
    if self.vocab_size is not None:
      self._check_top_k(self.vocab_size)

  @property
  def can_pause(self) -> bool:
    """See `types.Drafter`."""
    return False

  @property
  def reads_logits(self) -> bool:
    """See `types.Drafter`."""
    return True

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    table = lambda dtype, *sizes: sharding.zeros(
      (batch_size, *sizes), dtype, 'batch', *[None] * len(sizes)
    )
    size, top_k = self.num_positions, self.top_k
    return RecordingState(
      inner=self.drafter.init(params, batch_size, max_length),
      ring=Ring(
        position=table(jnp.int32, size) - 1,
        ids=table(jnp.int32, size, top_k),
        logits=table(jnp.float32, size, top_k),
        log_sum_exp=table(jnp.float32, size),
        count=table(jnp.int32),
      ),
      length=table(jnp.int32),
      goes_on=table(bool, self.num_draft_tokens + 1),
    )

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`."""
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
      length=length,
      goes_on=jnp.any(is_behind & is_drafted, axis=1),
    )

  def observe(self, params, tokens, count, output, verdict, state):
    """See `types.Drafter`: records the outputs of a round."""
    inner = self.drafter.observe(
      params, tokens, count, output, verdict, state.inner
    )
    if verdict is None:
      return dataclasses.replace(state, inner=inner)
    last = verdict.num_accepted[:, None]  # the output after the kept drafts
    if self.rejected_only:
      node = last
      if verdict.path is not None:
        nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)))
        node = jnp.take_along_axis(nodes, last, axis=1)
      goes_on = jnp.take_along_axis(state.goes_on, node, axis=1)
      # A stop among the kept drafts ends the round without another token.
      index, is_new = last, goes_on & (count[:, None] > last)
      logits = jnp.take_along_axis(output.logits, last[..., None], axis=1)
    else:
      logits = output.logits
      index = jnp.arange(logits.shape[1])[None]
      is_new = index < count[:, None]
    # A drafter without a vocabulary of its own could not check this before.
    self._check_top_k(logits.shape[-1])
    logits = logits.astype(jnp.float32)
    top, ids = indexing.top_k(logits, self.top_k)
    log_sum_exp = jax.nn.logsumexp(logits, axis=-1)
    is_new &= jnp.isfinite(log_sum_exp)
    ring = state.ring
    for i in range(logits.shape[1]):
      entry = Ring(
        position=(state.length[:, None] + index)[:, i],
        ids=ids[:, i],
        logits=top[:, i],
        log_sum_exp=log_sum_exp[:, i],
        count=ring.count,
      )
      ring = _write(ring, entry, is_new[:, i])
    return dataclasses.replace(state, inner=inner, ring=ring)

  def _check_top_k(self, vocab_size):
    if self.top_k > vocab_size:
      raise ValueError(
        f'top_k is {self.top_k}, but the target has {vocab_size} tokens: '
        'record at most that many'
      )


def _write(ring: Ring, entry: Ring, is_new: Array) -> Ring:
  """Writes an entry [B, ...] to the ring in rows where is_new [B] is set."""
  slots = jnp.arange(ring.position.shape[1])
  here = is_new[:, None] & (slots == (ring.count % slots.size)[:, None])

  def put(old, new):
    mask = here.reshape(*here.shape, *(1,) * (old.ndim - 2))
    return jnp.where(mask, new[:, None], old)

  return Ring(
    position=put(ring.position, entry.position),
    ids=put(ring.ids, entry.ids),
    logits=put(ring.logits, entry.logits),
    log_sum_exp=put(ring.log_sum_exp, entry.log_sum_exp),
    count=ring.count + is_new,
  )
