"""The objective of DSpark: its drafts, and the confidence in them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsample.drafters import dspark
from specsample.training import dflash
from specsample.training import losses
from specsample.training.objective import TeacherLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkObjective(dflash.DFlashObjective):
  """A `DFlashObjective` whose drafts are each given the token before them.

  The confidence learns 1 - TV(target, draft), the probability that a draft is
  kept. Its loss trains the confidence head alone and leaves the drafts as they
  are. (The total variation is over the draft vocabulary, as in the teacher's
  loss.)

  Attributes:
    drafter: DSpark.
    confidence_weight: weight of the cross-entropy of the confidence, which is
      weighted by `gamma` even if `slot_weights` is given.
  """

  drafter: dspark.DSpark
  token_weight: float = 0.1
  teacher_weight: float = 1.8
  teacher_loss: TeacherLoss = losses.total_variation
  confidence_weight: float = 1.0
  _kind: ClassVar[type] = dspark.DSpark

  def loss(self, params, drafted, learned):
    loss = super().loss(params, drafted, learned)
    if not self.confidence_weight:
      return loss
    # The loss below trains only the confidence head.
    fixed = jax.lax.stop_gradient((params, drafted))
    own = params['drafter']['confidence']
    fixed_params, drafted = fixed
    head = {**fixed_params['drafter'], 'confidence': own}
    found = self.drafter.confidence_logits(
      {**fixed_params, 'drafter': head}, drafted.vectors, drafted.before
    )
    teacher = self.teacher(fixed_params, drafted.hidden)
    kept = 1 - losses.total_variation(drafted.logits, teacher)
    values = jnp.logaddexp(0, found) - kept * found
    return loss + self.confidence_weight * self.mean(values, learned)
