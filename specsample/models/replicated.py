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

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def dim(self) -> int:
    return self.model.dim

  @property
  def dtype(self) -> str:
    return self.model.dtype

  @property
  def max_length(self) -> int:
    return self.model.max_length

  @property
  def is_recurrent(self) -> bool:
    """Whether the model cannot draft; see `checks.draft_model`."""
    return getattr(self.model, 'is_recurrent', False)

  def init(self, key: Array) -> Params:
    """Returns random parameters."""
    return self.model.init(key)

  def abstract_params(self) -> Params:
    """Returns the parameters' shapes and dtypes without allocating them."""
    return self.model.abstract_params()

  def param_axes(self) -> Params:
    """Returns the `sharding.Axes` of each parameter: none is divided."""
    whole = lambda axes: (None,) * len(axes)
    return sharding.map_axes(whole, self.model.param_axes())

  def init_cache(
    self, batch_size: int, max_length: int, max_new: int | None = None
  ) -> Cache:
    with _replicated():
      return self.model.init_cache(batch_size, max_length, max_new)

  def apply(
    self,
    params: Params,
    tokens: Array,
    cache: Cache,
    features: tuple[int, ...] = (),
    parents: Array | None = None,
  ) -> tuple[ModelOutput, Cache]:
    with _replicated():
      output, cache = self.model.apply(params, tokens, cache, features, parents)
    logits = self._divide(output.logits)
    return dataclasses.replace(output, logits=logits), cache

  def commit(
    self, cache: Cache, length: Array, path: Array | None = None
  ) -> Cache:
    with _replicated():
      return self.model.commit(cache, length, path)

  def embed(self, params: Params, ids: Array) -> Array:
    with _replicated():
      return self.model.embed(params, ids)

  def unembed(self, params: Params, hidden: Array) -> Array:
    with _replicated():
      logits = self.model.unembed(params, hidden)
    return self._divide(logits)

  def _divide(self, logits):
    vocab = sharding.Axis('vocab', self.vocab_size)
    others = [None] * (logits.ndim - 2)
    return sharding.constrain(logits, 'batch', *others, vocab)


def _replicated():
  """Returns a context that keeps only the sharding rules of the batch."""
  batch = tuple(rule for rule in sharding.rules.value if rule[0] == 'batch')
  return sharding.rules(batch)
