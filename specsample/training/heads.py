"""What heads on hidden vectors are trained for, as Medusa and Hydra are."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp

from specsample import sharding
from specsample.drafters import heads
from specsample.training import losses
from specsample.training.step import Batch
from specsample.types import Array, Params

# loss(logits [..., V], target_log_probs [..., V]) -> [...].
TeacherLoss = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsObjective:
  """The losses of all heads at all positions, as a `step.Objective`.

  A batch holds `tokens` [B, T] int32, a document a row, and `mask` [B, T] bool,
  set where the target wrote the token: those are learned. It may hold `hidden`
  [B, T, D], the target's vectors, found before.

  Medusa-1 is the default (Cai et al., 2401.10774, equation 1), Medusa-2 has a
  `target_weight` and a target that is trained. Hydra++ learns from the teacher
  alone: token_weight = 0, teacher_weight = 1 (Ankner et al., 2402.05109).

  Attributes:
    drafter: Medusa or Hydra.
    decay: the weight of head i is decay ** i, from 0.
    token_weight: of the cross-entropy of the tokens.
    teacher_weight: of `teacher_loss` against the target's distribution.
    teacher_loss: one of `losses`.
    target_weight: of the target's own cross-entropy.
  """

  drafter: heads.Heads
  decay: float = 0.8
  token_weight: float = 1.0
  teacher_weight: float = 0.0
  teacher_loss: TeacherLoss = losses.forward_kl
  target_weight: float = 0.0

  def __call__(
    self, params: Params, batch: Batch
  ) -> tuple[Array, dict[str, Array]]:
    """The loss [] and a report of the heads, [K] each.

    `head_loss` is their losses; `correct`, how often a head's most likely token
    is the one that came; `kept`, how often those of all heads up to it are:
    1 + its sum is how many tokens a round would give at temperature 0.
    """
    tokens, mask = batch['tokens'], batch['mask']
    hidden = self._hidden(params, batch)
    teacher = self._teacher(params, hidden)
    of_heads, matches, follows = [], [], []
    for i, vectors in enumerate(self.drafter.vectors(params, tokens, hidden)):
      # Recomputed for the gradient: the logits of all heads are too many.
      of_head = jax.checkpoint(functools.partial(self._of_head, i))
      loss, match = of_head(params, vectors, teacher, tokens, mask)
      of_heads.append(loss)
      matches.append(match)
      follows.append(_behind(mask, i + 2))
    loss = sum(self.decay**i * loss for i, loss in enumerate(of_heads))
    if self.target_weight:
      loss += self.target_weight * self._of_target(params, hidden, batch)
    match, follow = jnp.stack(matches), jnp.stack(follows)
    mean = jax.vmap(losses.masked_mean)
    return loss, {
      'head_loss': jnp.stack(of_heads),
      'correct': mean(match, follow),
      'kept': mean(jnp.cumprod(match, axis=0), jnp.cumprod(follow, axis=0) > 0),
    }

  def _hidden(self, params, batch):
    if 'hidden' in batch:
      return batch['hidden']
    tokens = batch['tokens']
    model = self.drafter.model
    cache = model.init_cache(*tokens.shape)
    output, _ = model.apply(params['target'], tokens, cache)
    return output.hidden

  def _teacher(self, params, hidden):
    """The target's log-probabilities [B, T, V'] of the tokens drafted."""
    if not self.teacher_weight:
      return None
    logits = self.drafter.model.unembed(params['target'], hidden)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_probs = self.drafter.of_drafted(params, log_probs)
    return jax.lax.stop_gradient(log_probs)

  def _of_head(self, i, params, vectors, teacher, tokens, mask):
    """Head i's loss [], and where [B, T] its most likely token came.

    At position t it learns token t + i + 2: the next one is pending.
    """
    logits = self.drafter.logits(params, vectors)
    learned = _behind(mask, i + 2)
    ids, is_drafted = self.drafter.draft_ids(params, _behind(tokens, i + 2))
    best = jnp.max(logits, axis=-1)
    match = is_drafted & (sharding.pick(logits, ids) == best)
    loss = jnp.zeros(())
    if self.token_weight:
      values = losses.cross_entropy(logits, ids)
      mean = losses.masked_mean(values, learned & is_drafted)
      loss += self.token_weight * mean
    if teacher is not None:
      values = self.teacher_loss(logits, _behind(teacher, i + 1))
      loss += self.teacher_weight * losses.masked_mean(values, learned)
    return loss, match

  def _of_target(self, params, hidden, batch):
    logits = self.drafter.model.unembed(params['target'], hidden)
    values = losses.cross_entropy(logits, _behind(batch['tokens'], 1))
    return losses.masked_mean(values, _behind(batch['mask'], 1))


def _behind(x, count):
  """x [B, T, ...] moved `count` positions to the front; behind it zeros."""
  padding = ((0, 0), (0, count)) + ((0, 0),) * (x.ndim - 2)
  return jnp.pad(x, padding)[:, count:]
