"""Texts to stop at, whatever tokens spell them.

An automaton (Aho and Corasick, 1975) reads the bytes of the tokens: a text may
begin and end inside a token, and a character may take several tokens.
"""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from specsample import checks
from specsample import text as text_lib
from specsample.vocabularies import token_bytes


@dataclasses.dataclass(frozen=True)
class StopTexts:
  """Texts at which a row stops, for `Stop(texts=...)`.

  A row stops with the first token at which the text of its new tokens has one
  of the texts in it. That token may go on behind the text; `before` cuts it.
  Control tokens count as spelled out, as in `decode(ids, skip_special=False)`,
  and a first token with its leading space, as in `text.continuation`.
  """

  tokenizer: text_lib.Tokenizer  # the target's
  texts: Sequence[str]

  def __post_init__(self):
    """Refuses what is no tokenizer, and texts that cannot be found."""
    checks.has(
      'tokenizer',
      self.tokenizer,
      ('encode_all', 'backend'),
      "give the target's, specsample.load(...).tokenizer",
    )
    self.tokenizer.encode_all(self.texts)  # raises for what is no list of texts
    object.__setattr__(self, 'texts', tuple(self.texts))
    if not self.texts or not all(self.texts):
      raise ValueError(
        f'texts is {self.texts}: give at least one text, and none that is empty'
      )

  def before(self, text: str) -> str:
    """Returns a text up to the stop text that ends first, or all of it.

    Of several that end at the same place, it is the longest.
    """
    starts = {stop: text.find(stop) for stop in self.texts}
    found = [(i + len(stop), i) for stop, i in starts.items() if i >= 0]
    return text[: min(found)[1]] if found else text

  def table(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns how tokens move the automaton, which begins in state 0.

    Returns:
      classes: [V] int32, the class of each token. After one of class 0, no text
        is under way, and none has ended.
      moves: [N, C] int32, from each of N states, by each of C classes: twice
        the next state, plus 1 if a text has ended within the token.
      longest: the number of bytes of the longest text.
    """
    return _table(self, vocab_size)


@functools.lru_cache(maxsize=16)
def _table(stop, vocab_size):
  tokens = token_bytes.from_tokenizer(stop.tokenizer)
  ids = range(vocab_size)
  spelled = [tokens[i].text if i in tokens else b'' for i in ids]
  lengths = np.asarray(list(map(len, spelled)))
  starts = np.cumsum(lengths) - lengths
  all_bytes = np.frombuffer(b''.join(spelled), np.uint8)
  texts = [text.encode() for text in stop.texts]
  following, ends = _automaton(texts)
  now = np.repeat(np.arange(len(ends))[:, None], vocab_size, axis=1)
  ended = np.zeros(now.shape, bool)
  for i in range(lengths.max()):
    here = np.flatnonzero(lengths > i)
    byte = all_bytes[starts[here] + i]
    ended[:, here] |= ends[now[:, here], byte]
    now[:, here] = following[now[:, here], byte]
  moves = 2 * now + ended
  moving = np.flatnonzero(moves.any(axis=0))
  kinds, inverse = np.unique(moves[:, moving], axis=1, return_inverse=True)
  classes = np.zeros(vocab_size, np.int32)
  classes[moving] = 1 + inverse.reshape(-1)
  moves = np.pad(kinds, ((0, 0), (1, 0))).astype(np.int32)
  return classes, moves, max(map(len, texts))


def _automaton(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Returns the next state, and whether a text ends: [N, 256] each, by byte.

  A state is the longest beginning of a text with which the bytes so far end.
  """
  states = sorted({text[:i] for text in texts for i in range(len(text))})
  numbers = {state: i for i, state in enumerate(states)}  # b'' is the first
  following = np.zeros((len(states), 256), int)
  ends = np.zeros((len(states), 256), bool)
  for i, state in enumerate(states):
    for byte in set(b''.join(texts)):
      seen = state + bytes([byte])
      ends[i, byte] = seen.endswith(tuple(texts))
      rests = (seen[start:] for start in range(len(seen) + 1))
      following[i, byte] = next(numbers[x] for x in rests if x in numbers)
  return following, ends
