"""A drafter made of some of the target's own layers: no further weights.

Zhang et al., 2309.08168 (Draft & Verify), with the layers given.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from specsample.drafters import chain
from specsample.drafters import settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skip:
  """A `Chain` whose model is the target with only `layers` (from 0) left.

  `model` is the target; it provides `keep_layers` and `keep_params`.
  """

  model: Any
  layers: Sequence[int]
  num_draft_tokens: int
  feature_layers = ()

  def __post_init__(self):
    """Refuses layers that the model does not have, and an empty draft."""
    layers = settings.check_layers(self.layers, self.model.num_layers)
    object.__setattr__(self, 'layers', layers)
    settings.check_num_draft_tokens(self.num_draft_tokens)

  @property
  def vocab_size(self) -> int:
    """The target's V."""
    return self.model.vocab_size

  @property
  def _chain(self) -> chain.Chain:
    return chain.Chain(
      model=self.model.keep_layers(self.layers),
      num_draft_tokens=self.num_draft_tokens,
    )

  def _params(self, params):
    return {'drafter': self.model.keep_params(params['target'], self.layers)}

  def init(self, params, batch_size, max_length):
    """See `types.Drafter`."""
    return self._chain.init(self._params(params), batch_size, max_length)

  def extend(self, params, tokens, count, output, state):
    """See `types.Drafter`."""
    return self._chain.extend(
      self._params(params), tokens, count, output, state
    )

  def propose(self, params, draw, warp, tokens, length, state):
    """See `types.Drafter`."""
    return self._chain.propose(
      self._params(params), draw, warp, tokens, length, state
    )

  def first(self, params, tokens, length, state):
    """See `sequential.Sequential`."""
    return self._chain.first(self._params(params), tokens, length, state)

  def go_on(self, params, tokens, carry):
    """See `sequential.Sequential`."""
    return self._chain.go_on(self._params(params), tokens, carry)

  def pause(self, params, tokens, length, state):
    """See `pausable.Pausable`."""
    return self._chain.pause(self._params(params), tokens, length, state)

  def resume(self, params, tokens, length, state):
    """See `pausable.Pausable`."""
    return self._chain.resume(self._params(params), tokens, length, state)

  def begin(self, params, tokens, length, state):
    """See `branching.Branching`."""
    return self._chain.begin(self._params(params), tokens, length, state)

  def grow(self, params, tokens, parents, carry):
    """See `branching.Branching`."""
    return self._chain.grow(self._params(params), tokens, parents, carry)

  def end(self, carry, state):
    """See `branching.Branching`."""
    return self._chain.end(carry, state)

  def target_ids(self, params, ids):
    """See `branching.Branching`."""
    return self._chain.target_ids(params, ids)

  def widen(self, params, logits):
    """See `branching.Branching`."""
    return self._chain.widen(params, logits)

  def update(self, params, tokens, length, output, verdict, state):
    """See `types.Drafter`."""
    return self._chain.update(
      self._params(params), tokens, length, output, verdict, state
    )
