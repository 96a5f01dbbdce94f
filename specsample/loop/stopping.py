"""Stop conditions other than a row's length: EOS ids and token sequences."""

from collections.abc import Sequence
import dataclasses
import operator
from typing import Any

import jax.numpy as jnp

from specsample import checks
from specsample.types import Array, DecodeState, StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """Stop conditions other than length. The stop tokens are emitted too."""

  eos_ids: Sequence[int] = ()
  # Token sequences; a match that begins in the prompt does not count.
  sequences: Sequence[Sequence[int]] = ()

  def __post_init__(self):
    """Turns lists into tuples; raises ValueError unless they hold integers."""
    try:
      ids, sequences = _ids(self.eos_ids), tuple(map(_ids, self.sequences))
    except TypeError as error:
      raise ValueError(
        f'eos_ids are {self.eos_ids!r} and sequences {self.sequences!r}: give '
        'token ids, such as (2,), and sequences of token ids, such as '
        '((5, 6), (7,))'
      ) from error
    if not all(sequences):
      raise ValueError(
        f'sequences are {sequences}, but an empty one would match everywhere: '
        'leave it out'
      )
    object.__setattr__(self, 'eos_ids', ids)
    object.__setattr__(self, 'sequences', sequences)

  def check(self, vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary."""
    for sequence in (self.eos_ids, *self.sequences):
      outside = [i for i in sequence if not 0 <= i < vocab_size]
      if outside:
        raise ValueError(
          f'a stop token has id {outside[0]}, outside the vocabulary of '
          f"{vocab_size}: was it made by another model's tokenizer?"
        )


def _ids(ids) -> tuple[int, ...]:
  if isinstance(ids, bytes) or any(isinstance(i, bool) for i in ids):
    raise TypeError('bytes and booleans are no ids')
  return tuple(map(operator.index, ids))


def check(stop: Any, model: Any) -> None:
  """Raises ValueError unless given a `Stop` and a model that has its ids."""
  checks.model(model)
  checks.instance('stop', stop, Stop, 'give Stop(eos_ids=...), or leave it out')
  stop.check(model.vocab_size)


def reasons(state: DecodeState, tokens: Array, stop: Stop) -> Array:
  """Returns the StopReason [B, n] that each of tokens [B, n] gives, or 0.

  The tokens follow those in the state; a stop sequence may begin in an earlier
  round.
  """
  eos_ids = jnp.asarray(stop.eos_ids, jnp.int32)
  is_eos = jnp.any(tokens[..., None] == eos_ids, axis=-1)
  longest = max([len(sequence) for sequence in stop.sequences], default=1)
  positions = state.length[:, None] + jnp.arange(1 - longest, 0)
  earlier = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0), axis=1)
  earlier = jnp.where(positions >= state.prompt_length[:, None], earlier, -1)
  recent = jnp.concatenate([earlier, tokens], axis=1)

  ends_sequence = jnp.zeros(tokens.shape, bool)
  for sequence in stop.sequences:
    matches = jnp.ones(tokens.shape, bool)
    for back, token in enumerate(reversed(sequence)):
      begin = longest - 1 - back
      matches &= recent[:, begin : begin + tokens.shape[1]] == token
    ends_sequence |= matches
  reason = jnp.where(ends_sequence, StopReason.SEQUENCE, StopReason.RUNNING)
  return jnp.where(is_eos, StopReason.EOS, reason)
