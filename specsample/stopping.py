"""What ends a row besides its length: EOS ids and token sequences."""

import dataclasses

import jax.numpy as jnp

from specsample.types import Array, DecodeState, StopReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """What ends a row besides its length. The stop itself is emitted too."""

  eos_ids: tuple[int, ...] = ()
  # Token sequences; one that begins in the prompt does not count.
  sequences: tuple[tuple[int, ...], ...] = ()

  def check(self, vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary and empty sequences."""
    for sequence in (self.eos_ids, *self.sequences):
      outside = [i for i in sequence if not 0 <= i < vocab_size]
      if outside:
        raise ValueError(
          f'a stop token has id {outside[0]}, outside the vocabulary of '
          f"{vocab_size}: was it made by another model's tokenizer?"
        )
    if not all(self.sequences):
      raise ValueError('a stop sequence is empty: it would match everywhere')


def reasons(state: DecodeState, tokens: Array, stop: Stop) -> Array:
  """The StopReason [B, n] that each of tokens [B, n] would give, or 0.

  The tokens continue the state's; a sequence may begin in earlier rounds.
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
