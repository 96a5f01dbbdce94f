"""A drafter made of some of the target's own layers: no further weights.

Zhang et al., 2309.08168 (Draft & Verify), with the layers given.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from specsample import checks
from specsample.drafters import chain
from specsample.drafters import fields
from specsample.types import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skip(chain.OverModel):
  """A drafter like `Chain` over the target with only `layers` (from 0) left.

  `model` is the target; it provides `keep_layers` and `keep_params`.
  """

  model: Any
  layers: Sequence[int]
  num_draft_tokens: fields.DraftLength

  def _check(self):
    checks.model(self.model)
    fields.check_layers('layers', self.layers, self.model.num_layers)
    checks.draft_model(self.draft_model)

  @property
  def vocab_size(self) -> int:
    """The target's V."""
    return self.model.vocab_size

  @property
  def draft_model(self) -> Model:
    return self.model.keep_layers(self.layers)

  def draft_params(self, params):
    return self.model.keep_params(params['target'], self.layers)
