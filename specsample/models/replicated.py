"""A model that every device of a mesh holds whole."""

import dataclasses
from typing import Any

from specsample import sharding
from specsample.types import Array, Cache, ModelOutput, Params


@dataclasses.dataclass(frozen=True)
class Replicated:
  """A wrapper that divides `model` over the batch only.

  This is for a drafter so small that the all-reduces of its layers would take
  longer than reading all its weights on every device. Its logits are divided
  over the vocabulary, as the target's are.
  """

  model: Any

  vocab_size = property(lambda self: self.model.vocab_size)
  dim = property(lambda self: self.model.dim)
  dtype = property(lambda self: self.model.dtype)
  max_length = property(lambda self: self.model.max_length)
  is_recurrent = property(lambda self: self.model.is_recurrent)
  init = property(lambda self: self.model.init)
  abstract_params = property(lambda self: self.model.abstract_params)

  def param_axes(self) -> Params:
    """Returns the `sharding.Axes` of each parameter: none is divided."""
    whole = lambda axes: (None,) * len(axes)
    return sharding.map_axes(whole, self.model.param_axes())

  def init_cache(self, *args, **kwargs) -> Cache:
    return _over_batch(self.model.init_cache, *args, **kwargs)

  def apply(
    self, params, tokens, cache, features=(), parents=None
  ) -> tuple[ModelOutput, Cache]:
    output, cache = _over_batch(
      self.model.apply, params, tokens, cache, features, parents
    )
    logits = self._divide(output.logits)
    return dataclasses.replace(output, logits=logits), cache

  def commit(self, cache, length, path=None) -> Cache:
    return _over_batch(self.model.commit, cache, length, path)

  def embed(self, params, ids) -> Array:
    return _over_batch(self.model.embed, params, ids)

  def unembed(self, params, hidden) -> Array:
    return self._divide(_over_batch(self.model.unembed, params, hidden))

  def _divide(self, logits):
    vocab = sharding.Axis('vocab', self.vocab_size)
    others = [None] * (logits.ndim - 2)
    return sharding.constrain(logits, 'batch', *others, vocab)


def _over_batch(function, *args, **kwargs):
  """Calls a function under the sharding rules of the batch alone."""
  batch = tuple(rule for rule in sharding.rules.value if rule[0] == 'batch')
  with sharding.rules(batch):
    return function(*args, **kwargs)
