"""A chat template as what stands before and after a user's turn."""

import dataclasses

from specsample import text as text_lib

# Words that no template writes itself.
_PLACEHOLDER = 'Here7Stands3The5Turn'


@dataclasses.dataclass(frozen=True)
class Template:
  """Token ids around the one user turn of a chat.

  Attributes:
    before: all up to the turn's first token; not empty.
    after: from the end of the turn to the beginning of the answer; not empty.
  """

  before: tuple[int, ...]
  after: tuple[int, ...]

  @classmethod
  def of(cls, tokenizer: text_lib.Tokenizer) -> 'Template':
    """Derives both from the tokenizer's chat template.

    Raises:
      ValueError: there is no template, or none in which a turn has a place of
        its own.
    """
    chat = tokenizer.chat([{'role': 'user', 'content': _PLACEHOLDER}])
    parts = chat.split(_PLACEHOLDER)
    if len(parts) != 2 or not all(parts):
      raise ValueError(
        "the chat template does not write a user's turn once, with text before "
        'and after it: give the model another template'
      )
    before, after = (_encode(tokenizer, part) for part in parts)
    return cls(before, after)

  def opened(
    self, tokenizer: text_lib.Tokenizer, words: str
  ) -> tuple[int, ...]:
    """`before` with the first words of the turn."""
    return self.before + _encode(tokenizer, words)


def _encode(tokenizer, text):
  """Without the BOS of a whole text; control tokens are parsed."""
  num_added = len(tokenizer.encode(''))
  return tuple(tokenizer.encode(text, parse_special=True)[num_added:])
