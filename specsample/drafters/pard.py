"""Drafting K tokens in one pass of a small language model.

An et al., 2504.18583 (PARD).
"""

import dataclasses

import jax.numpy as jnp

from specsample import indexing
from specsample.drafters import chain
from specsample.drafters import fields
from specsample.drafters import steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class PARD(steps.OnePass, chain.OfTwoModels):
  """A drafter that draws K tokens in one pass over [text, mask, ..., mask].

  `model` is a language model that was trained to go on from masks: draft 0 is
  read at the pending token, and draft i at mask i - 1, which sees the text and
  the masks before it. As in Medusa, no draft sees the token drawn before it.

  A pass reads up to K + 1 tokens, as many as a round adds, and K - 1 masks. The
  masks' keys and values are overwritten in the next round. In the text
  `mask_token_id` is a token like any other.
  """

  mask_token_id: int

  def _check(self):
    super()._check()
    fields.check_mask(self.mask_token_id, self.model.vocab_size)

  @property
  def _num_read(self) -> int:
    return self.num_draft_tokens + 1

  def slots(self, params, tokens, length, state):
    is_text = jnp.arange(tokens.shape[1]) < length[:, None]
    num_masks = self.num_draft_tokens - 1
    output, pending, state = self._read(
      params,
      jnp.where(is_text, tokens, self.mask_token_id),
      length,
      state,
      self._num_read,
      num_masks,
    )
    index = pending[:, None] + jnp.arange(1 + num_masks)
    hidden = indexing.at(output.hidden, index)
    return self.model.unembed(self.draft_params(params), hidden), state
