"""GRPO's objective (Shao et al., 2402.03300), without its KL term."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specsample.types import Array, ArrayLike, Model, Params

# Keeps the advantages finite if the rewards of a group are nearly equal.
_LEAST_SPREAD = 1e-4


def advantages(rewards: ArrayLike) -> np.ndarray:
  """Returns each answer's advantage over the other answers to its prompt.

  Args:
    rewards: [N, G], of G answers to each of N prompts.

  Returns:
    [N, G] float32, of mean 0 and deviation 1 in each group. If all answers of a
    group have the same reward, nothing can be learned from them: they are 0.
  """
  rewards = np.asarray(rewards, np.float32)
  from_mean = rewards - rewards.mean(axis=1, keepdims=True)
  return from_mean / (rewards.std(axis=1, keepdims=True) + _LEAST_SPREAD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo:
  """The clipped loss, averaged over each answer's tokens and over the answers.

  A batch holds `rollouts`, a `specsample.Rollouts` of N prompts with G answers,
  and `advantages` [N, G] float32.

  Attributes:
    model: the policy, with parameters params['target'].
    temperature: that of the rollouts, above 0; no other setting warped them.
    clip: epsilon; once a token's probability has moved by this share from the
      one that it was drawn with, it is not moved further.
  """

  model: Model
  temperature: float
  clip: float = 0.2

  def __call__(
    self, params: Params, batch: Mapping[str, Any]
  ) -> tuple[Array, dict[str, Array]]:
    """Returns the loss [], and a report.

    The report has `clipped` [], the share of tokens that are not moved further.
    """
    rollouts, advantage = batch['rollouts'], batch['advantages'][..., None]
    mask = rollouts.mask
    log_probs = rollouts.score(params['target'], self.model, self.temperature)
    ratio = jnp.exp(jnp.where(mask, log_probs - rollouts.warped_log_probs, 0))
    near = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
    gain = jnp.minimum(ratio * advantage, near * advantage)
    of_answers = jnp.sum(gain * mask, axis=-1) / rollouts.lengths
    is_clipped = mask & (near * advantage < ratio * advantage)
    clipped = jnp.sum(is_clipped) / jnp.sum(mask)
    return -jnp.mean(of_answers), {'clipped': clipped}
