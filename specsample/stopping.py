"""Stop conditions other than a row's length: EOS ids, token sequences, texts.

The compiled loop gets them as arrays whose sizes are rounded up, so that other
conditions of about the same size need no other program.
"""

from collections.abc import Sequence
import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specsample import checks
from specsample import sharding
from specsample import types
from specsample.types import Array, ArrayLike, DecodeState, Model, StopReason

# The fewest end tokens, stop sequences, tokens of one and so on that have room.
_LEAST = 8


@types.pytree
class Conditions:
  """A `Stop` as arrays, padded so that many stops have the same shapes."""

  eos_ids: ArrayLike  # [E] int32, padded with -1
  # [R, L] int32, each at the end of its row, behind -1. A row of -1 pads.
  sequences: ArrayLike
  # `StopTexts.table`, if there are texts. The class of token -1 comes first.
  classes: ArrayLike | None = None  # [V + 1] int32
  moves: ArrayLike | None = None  # [N, C] int32
  before: int = types.static(default=0)  # how many tokens a text may begin back


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """Stop conditions other than length. The stop tokens are emitted too.

  Attributes:
    eos_ids: a row ends with any of these tokens.
    sequences: a row ends where its last new tokens are one of these sequences,
      token by token. A match that begins in the prompt does not count. A text
      has many spellings, of which this matches one: 'Blue' and ' Blue' are
      different tokens, and a sequence that begins with BOS, as
      `Tokenizer.encode` may return it, never matches.
    texts: a row ends with the token that completes one of these texts, however
      it is spelled: StopTexts(tokenizer, ['Question:']).
  """

  eos_ids: Sequence[int] = ()
  sequences: Sequence[Sequence[int]] = ()
  texts: Any = None  # a `StopTexts`, which the loop does not know

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
    if self.texts is not None:
      checks.has(
        'texts',
        self.texts,
        ('table',),
        'give StopTexts(tokenizer, [...]), or leave it out',
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

  def conditions(self, vocab_size: int) -> Conditions:
    """Returns the stop as arrays on the host."""
    longest = max(map(len, self.sequences), default=0)
    sequences = np.full((_room(len(self.sequences)), _room(longest)), -1)
    for row, ids in zip(sequences, self.sequences, strict=False):
      row[-len(ids) :] = ids
    eos_ids = np.full(max(_LEAST, _room(len(self.eos_ids))), -1)
    eos_ids[: len(self.eos_ids)] = self.eos_ids
    found = Conditions(
      eos_ids=eos_ids.astype(np.int32), sequences=sequences.astype(np.int32)
    )
    if self.texts is None:
      return found
    classes, moves, longest = self.texts.table(vocab_size)
    return dataclasses.replace(
      found,
      classes=np.pad(classes, (1, 0)),
      moves=np.pad(moves, [(0, _room(size) - size) for size in moves.shape]),
      before=_room(longest) - 1,
    )


def _room(count: int) -> int:
  """Returns 0, or a count rounded up to a power of two, at least `_LEAST`."""
  return max(_LEAST, 1 << (count - 1).bit_length()) if count else 0


def _ids(ids) -> tuple[int, ...]:
  if isinstance(ids, bytes) or any(isinstance(i, bool) for i in ids):
    raise TypeError('bytes and booleans are no ids')
  return tuple(map(operator.index, ids))


def check(stop: Any, model: Any) -> None:
  """Raises ValueError unless given a `Stop` and a model that has its ids."""
  checks.model(model)
  checks.instance('stop', stop, Stop, 'give Stop(eos_ids=...), or leave it out')
  stop.check(model.vocab_size)


def placed(stop: Any, model: Model) -> Conditions:
  """Checks a stop and puts it on the device, whole on each of a mesh."""
  check(stop, model)
  found = stop.conditions(model.vocab_size)
  whole = lambda x: (None,) * x.ndim
  return sharding.place(found, jax.tree.map(whole, found))


def reasons(state: DecodeState, tokens: Array, stop: Conditions) -> Array:
  """Returns the StopReason [B, n] that each of tokens [B, n] gives, or 0.

  The tokens follow those in the state; a stop sequence may begin in an earlier
  round.
  """
  is_eos = jnp.any(tokens[..., None] == stop.eos_ids, axis=-1)
  ends = _ends_sequence(state, tokens, stop.sequences)
  if stop.moves is not None:
    ends |= _ends_text(state, tokens, stop)
  reason = jnp.where(ends, StopReason.SEQUENCE, StopReason.RUNNING)
  return jnp.where(is_eos, StopReason.EOS, reason)


def _ends_sequence(state, tokens, sequences) -> Array:
  """Returns which of the tokens [B, n] end one of the sequences [R, L]."""
  longest, count = sequences.shape[1], tokens.shape[1]
  if not longest:
    return jnp.zeros(tokens.shape, bool)
  recent = _recent(state, tokens, longest - 1)
  ends = [recent[:, i : i + count] for i in range(longest)]
  is_same = jnp.stack(ends, axis=-1)[:, :, None] == sequences
  matches = jnp.all(is_same | (sequences < 0), axis=-1)
  return jnp.any(matches & (sequences[:, -1] >= 0), axis=-1)


def _ends_text(state, tokens, stop) -> Array:
  """Returns which of the tokens [B, n] complete a text.

  An earlier token adds a byte or more, so that what is under way has begun
  within the last `before` tokens.
  """

  def of_rows(recent, classes, moves):
    def read(now, kind):
      move = moves[now, kind]
      return move // 2, move % 2

    first = 0 * recent[:, 0]  # divided like the rows
    _, ended = jax.lax.scan(read, first, classes[recent + 1].T)
    return ended.T[:, stop.before :] > 0

  return sharding.map_parts(
    of_rows,
    (_recent(state, tokens, stop.before), stop.classes, stop.moves),
    (('batch', None), (None,), (None, None)),
    result=('batch', None),
  )


def _recent(state, tokens, before) -> Array:
  """Returns the tokens behind those `before` them; -1 is not a new token."""
  positions = state.length[:, None] + jnp.arange(-before, 0)
  earlier = jnp.take_along_axis(state.tokens, jnp.maximum(positions, 0), axis=1)
  earlier = jnp.where(positions >= state.prompt_length[:, None], earlier, -1)
  return jnp.concatenate([earlier, tokens], axis=1)
