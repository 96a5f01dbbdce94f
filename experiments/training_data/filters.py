"""Which texts are fit to learn from: no duplicate, no loop, none of a test."""

from collections.abc import Iterable, Sequence
import hashlib
import unicodedata

# A loop is that most of so many last tokens repeat, counted by n-grams.
_WINDOW = 96
_SHORTEST = 32
_NGRAM = 4
_MOST_REPEATED = 0.5
# Texts that share so many words in a row are of one origin, as in Brown et al.,
# 2005.14165, appendix C.
_COMMON_WORDS = 13


def words(text: str) -> list[str]:
  """The words of a text, without case, accents' encoding and punctuation."""
  folded = unicodedata.normalize('NFKC', text).casefold()
  return ''.join(c if c.isalnum() else ' ' for c in folded).split()


def digest(text: str) -> int:
  """64 bits that are the same for texts of the same words.

  Of a text without words, its characters count.
  """
  normal = ' '.join(words(text)) or text.strip()
  return int.from_bytes(hashlib.sha256(normal.encode()).digest()[:8], 'big')


def repeated_share(tokens: Sequence[int]) -> float:
  """Which share of the n-grams has occurred before among them."""
  ngrams = [tuple(tokens[i : i + _NGRAM]) for i in _starts(tokens, _NGRAM)]
  return 1 - len(set(ngrams)) / len(ngrams)


def loops(tokens: Sequence[int]) -> bool:
  """Whether the end of a text has become a repetition."""
  if len(tokens) < _SHORTEST:
    return False
  return repeated_share(tokens[-_WINDOW:]) > _MOST_REPEATED


class Exclusion:
  """Texts that nothing may be taken from."""

  def __init__(self, texts: Iterable[str]):
    """Of texts shorter than the common run only the whole counts."""
    self._runs = {run for text in texts for run in _runs(words(text))}

  def __contains__(self, text: str) -> bool:
    return not self._runs.isdisjoint(_runs(words(text)))


def _runs(items: list[str]) -> set[str]:
  return {
    ' '.join(items[i : i + _COMMON_WORDS])
    for i in _starts(items, _COMMON_WORDS)
  }


def _starts(items, length):
  """Where runs of that length begin; one, if there are not so many items."""
  return range(max(1, len(items) - length + 1))
