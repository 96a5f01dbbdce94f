"""The objective of heads on hidden states, as in Medusa and Hydra."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specsample.drafters import heads
from specsample.training import losses
from specsample.training import objective
from specsample.training import rows as rows_lib
from specsample.training import slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsObjective(objective.Objective):
  """The losses of all heads at all positions: an `objective.Objective`.

  The default is Medusa-1 (Cai et al., 2401.10774, equation 1); Medusa-2 has a
  `target_weight` and trains the target too. Hydra++ learns from the teacher
  alone: token_weight = 0, teacher_weight = 1 (Ankner et al., 2402.05109).

  Attributes:
    drafter: Medusa or Hydra.
    decay: the weight of head i is decay ** i, from 0.
    slot_weights: one of `slots`, whose weights replace those of `decay`.
    target_weight: weight of the target's own cross-entropy.
  """

  drafter: heads.Heads
  decay: float = 0.8
  slot_weights: slots.SlotWeights | None = None
  target_weight: float = 0.0
  _kind: ClassVar[type] = heads.Heads

  def _check(self):
    super()._check()
    if self.target_weight and self.drafter.draft_vocab_size is not None:
      raise ValueError(
        f'target_weight is {self.target_weight}, but the columns of the draft '
        'vocabulary were copied from the target before its training: set '
        'draft_vocab_size = None'
      )

  def __call__(self, params, batch):
    """Returns the loss [] and a report of the heads, [K] each.

    `head_loss` holds their losses; the rest is from `objective.acceptance`.
    """
    if self.target_weight and 'hidden' in batch:
      raise ValueError(
        f'target_weight is {self.target_weight}, but the hidden vectors in the '
        'batch come from the target before its training: leave them out'
      )
    hidden = self.hidden(params, batch)
    found, rows = self._compare(params, batch, hidden)
    loss = slots.total(found, rows, self.decay, self.slot_weights)
    if self.target_weight:
      loss += self.target_weight * self._of_target(params, hidden, batch)
    learned = rows.after_first(self.drafter.num_draft_tokens)
    accepted = objective.acceptance(found.match, learned)
    of_heads = jnp.sum(found.losses, axis=(1, 2))
    return loss, {'head_loss': of_heads} | accepted

  def matches(self, params, batch):
    found, rows = self._compare(params, batch, self.hidden(params, batch))
    return found.match & rows.after_first(self.drafter.num_draft_tokens)

  def num_rows(self, matrix, batch):
    found = super().num_rows(matrix, batch)
    if matrix == 'unembedding':
      return self.drafter.num_draft_tokens * found
    if matrix == 'target' and self.target_weight:
      return found + batch['tokens'].size
    return found

  def _compare(self, params, batch, hidden):
    """Returns the comparison of the heads with the text, and the rows."""
    rows, crop = rows_lib.of(batch), lambda x: rows_lib.crop(batch, x)
    of_all = self.drafter.vectors(
      params, batch['tokens'], hidden, rows_lib.begins(batch)
    )
    # Head i at position t drafts token t + i + 2: token t + 1 is pending.
    vectors = list(map(crop, of_all))
    return self.compare(2, params, vectors, crop(hidden), rows), rows

  def _of_target(self, params, hidden, batch):
    logits = self.drafter.model.unembed(params['target'], hidden)
    rows = rows_lib.whole(batch)
    entropy = losses.cross_entropy(logits, rows_lib.behind(rows.tokens, 1))
    return losses.masked_mean(entropy, rows.learned(1))
