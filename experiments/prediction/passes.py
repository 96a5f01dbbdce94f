"""The time of a model's passes: as it was measured, or as a chip allows."""

from collections.abc import Mapping
import dataclasses
from typing import Protocol

import gin

from specsample import cost
from specsample.cost import chips
from specsample.cost import work
from specsample.models import transformer

# Fields of a model, if they are set, that change what a pass reads.
_NOT_COVERED = {
  'latent': 'attention over latent vectors',
  'delta': 'recurrent layers',
  'sliding_window': 'a sliding window',
  'full_head_dim': 'heads of two sizes',
  'num_shared': 'layers that read the keys and values of others',
  'layer_input_dim': 'embeddings per layer',
}


class Passes(Protocol):
  """The properties of a model that a prediction asks for."""

  def seconds(self, num_tokens: int, batch: int, context: int) -> float:
    """Returns the time of a pass over `num_tokens` tokens of each batch row."""

  def bound(self, num_tokens: int, batch: int, context: int) -> str | None:
    """Returns what limits the pass; None if that is not known."""

  def held_bytes(self, batch: int, context: int) -> float | None:
    """Returns the bytes of weights and caches per device; None if unknown."""

  def num_weights(self) -> int | None:
    """Returns the number of all weights; None if it is not known."""


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
  """A model whose passes were timed, on any hardware.

  Attributes:
    ms: milliseconds of a pass by its number of tokens, those of all rows of a
      batch; interpolated linearly in between, never extrapolated.
  """

  ms: Mapping[int, float]

  def __post_init__(self):
    """Refuses values that are not numbers."""
    numbers = (*self.ms, *self.ms.values())
    if not all(isinstance(number, int | float) for number in numbers):
      raise ValueError(
        f'Timed.ms is {self.ms}: give milliseconds by number of tokens, '
        'such as {1: 14.1}'
      )

  def seconds(self, num_tokens: int, batch: int, context: int) -> float:
    """See `Passes`; the context is the one that was timed."""
    del context
    tokens = tuple(sorted(self.ms))
    times = cost.PassTimes(tokens, tuple(self.ms[n] / 1e3 for n in tokens))
    return times(batch * num_tokens)

  def bound(self, num_tokens: int, batch: int, context: int) -> None:
    """See `Passes`."""
    del num_tokens, batch, context

  def held_bytes(self, batch: int, context: int) -> None:
    """See `Passes`."""
    del batch, context

  def num_weights(self) -> None:
    """See `Passes`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnChips:
  """A model sharded over devices, at their roofline."""

  decoder: work.Decoder
  chip: chips.Chip
  devices: int

  def seconds(self, num_tokens: int, batch: int, context: int) -> float:
    """See `Passes`."""
    return self._work(num_tokens, batch, context).seconds(self.chip)

  def bound(self, num_tokens: int, batch: int, context: int) -> str:
    """See `Passes`."""
    return self._work(num_tokens, batch, context).bound(self.chip)

  def held_bytes(self, batch: int, context: int) -> float:
    """See `Passes`."""
    return self.decoder.held_bytes(
      batch=batch, context=context, devices=self.devices
    )

  def num_weights(self) -> int:
    """See `Passes`."""
    return self.decoder.num_weights()

  def _work(self, num_tokens, batch, context):
    return self.decoder.work(
      num_tokens, batch=batch, context=context, devices=self.devices
    )


def decoder(
  model: transformer.Transformer, weights: str | None = None
) -> work.Decoder:
  """Returns the shape of a model, from which its cost follows.

  Args:
    model: the model; no weights are read.
    weights: 'int8' for 8 bits per weight, None for the model's own.

  Raises:
    ValueError: the model has parts that `work.Decoder` does not describe.
  """
  found = [
    f'{words} ({name})'
    for name, words in _NOT_COVERED.items()
    if getattr(model, name)
  ]
  if found:
    raise ValueError(
      f'the model has {", ".join(found)}, which the cost of a pass does not '
      'cover: give its passes as passes.Timed, timed after a context as long '
      'as that of the prediction'
    )
  size = {'float32': 4, 'bfloat16': 2}[model.dtype]
  experts = model.experts
  of_experts = {}
  if experts is not None:
    of_experts = {
      'num_experts': experts.num_experts,
      'num_per_token': experts.num_per_token,
      'expert_dim': experts.mlp_dim,
      'shared_dim': experts.shared_dim,
      'num_dense_layers': len(experts.dense_layers),
    }
  return work.Decoder(
    num_layers=model.num_layers,
    dim=model.dim,
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    head_dim=model.head_dim,
    mlp_dim=model.mlp_dim,
    vocab_size=model.vocab_size,
    tie_embeddings=model.tie_embeddings,
    weight_bytes=1 if weights == 'int8' else size,
    cache_bytes=1 if model.has_int8_cache else size,
    **of_experts,
  )
