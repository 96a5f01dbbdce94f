"""The objective of DFlash 2: its blocks, and the selection of their tokens."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specsample.drafters import dflash2
from specsample.training import dflash
from specsample.training import losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Objective(dflash.DFlashObjective):
  """A `DFlashObjective` whose drafts are selected among candidates.

  The losses of a `DFlashObjective` are those of the block's logits, without a
  token before. The selection learns the text's token by its cross-entropy
  among the candidates, given the token before it in the text. Drafts whose
  candidates lack the text's token are left out of it.

  Attributes:
    drafter: DFlash2.
    selector_weight: weight of the cross-entropy of the selection.
  """

  drafter: dflash2.DFlash2
  selector_weight: float = 1.0
  _kind: ClassVar[type] = dflash2.DFlash2

  def loss(self, params, drafted, learned):
    loss = super().loss(params, drafted, learned)
    if not self.selector_weight:
      return loss
    logits, is_token = self._selection(params, drafted)
    values = jax.nn.logsumexp(logits, axis=-1)
    values -= jnp.sum(jnp.where(is_token, logits, 0), axis=-1)
    # Weights are of all drafts that are learned, also of those left out.
    entropy = losses.cross_entropy(drafted.logits, drafted.ids)
    weights = self.weights(drafted, entropy, learned)
    learned &= jnp.any(is_token, axis=-1)
    return loss + self.selector_weight * self.mean(values, learned, weights)

  def came(self, params, drafted):
    """See `DFlashObjective`: where the text's token is selected."""
    logits, is_token = self._selection(params, drafted)
    best = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.any(is_token & (logits == best), axis=-1)

  def _selection(self, params, drafted):
    """Returns the candidates' logits, and which is the text's token.

    Both are [B, n, K, C].
    """
    found = self.drafter.candidates(params, drafted.logits, drafted.vectors)
    is_token = (found.ids == drafted.ids[..., None]) & (
      drafted.is_drafted[..., None]
    )
    return self.drafter.select(params, found, drafted.before), is_token

  def _logits(self, params, vectors, before):
    del before
    return self.drafter.capped(self.drafter.logits(params, vectors))
