"""Filters for training texts: duplicates, loops, and texts of a test set."""

from collections.abc import Iterable, Sequence
import hashlib
import unicodedata

# A text loops if more than _MOST_REPEATED of the n-grams in its last _WINDOW
# tokens are repetitions; a text shorter than _SHORTEST never does.
_WINDOW = 96
_SHORTEST = 32
_NGRAM = 4
_MOST_REPEATED = 0.5
_LOOKS = 8  # where a text is cut if it loops: at a multiple of this
# Texts that share this many words in a row have a common origin, as in Brown et
# al., 2005.14165, appendix C.
_COMMON_WORDS = 13


def words(text: str) -> list[str]:
  """Returns a text's words in NFKC, casefolded and without punctuation."""
  folded = unicodedata.normalize('NFKC', text).casefold()
  return ''.join(c if c.isalnum() else ' ' for c in folded).split()


def digest(text: str) -> int:
  """Returns 64 bits that are equal for texts with the same words.

  For a text without words, they depend on its characters.
  """
  normal = ' '.join(words(text)) or text.strip()
  return int.from_bytes(hashlib.sha256(normal.encode()).digest()[:8], 'big')


def repeated_share(tokens: Sequence[int]) -> float:
  """Returns the share of the n-grams that have occurred before among them."""
  ngrams = [tuple(tokens[i : i + _NGRAM]) for i in _starts(tokens, _NGRAM)]
  return 1 - len(set(ngrams)) / len(ngrams)


def loops(tokens: Sequence[int]) -> bool:
  """Returns whether the end of a text has become a repetition."""
  if len(tokens) < _SHORTEST:
    return False
  return repeated_share(tokens[-_WINDOW:]) > _MOST_REPEATED


def loop(tokens: Sequence[int]) -> int | None:
  """Returns the length at which a text has become a repetition, or None."""
  for size in range(_LOOKS, len(tokens) + 1, _LOOKS):
    if loops(tokens[:size]):
      return size
  return None


class Exclusion:
  """A set of texts that no user turn may overlap."""

  def __init__(self, texts: Iterable[str]):
    """Takes the texts; one shorter than a run only matches as a whole."""
    self._runs = {run for text in texts for run in _runs(words(text))}

  def __contains__(self, text: str) -> bool:
    return not self._runs.isdisjoint(_runs(words(text)))


def _runs(items: list[str]) -> set[str]:
  return {
    ' '.join(items[i : i + _COMMON_WORDS])
    for i in _starts(items, _COMMON_WORDS)
  }


def _starts(items, length):
  """Returns where runs of a length begin; only 0 if there are too few items."""
  return range(max(1, len(items) - length + 1))
