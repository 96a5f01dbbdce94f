"""A chat template, as the tokens before and after a user's turn."""

import dataclasses

from specsample import text as text_lib

# Text that no template contains.
_PLACEHOLDER = 'Here7Stands3The5Turn'


@dataclasses.dataclass(frozen=True)
class Template:
  """The token ids around the only user turn of a chat.

  Attributes:
    before: everything before the turn; not empty.
    after: everything between the turn and the answer; not empty.
  """

  before: tuple[int, ...]
  after: tuple[int, ...]

  @classmethod
  def of(cls, tokenizer: text_lib.Tokenizer) -> 'Template':
    """Derives `before` and `after` from the tokenizer's chat template."""
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
    """Returns `before`, followed by the first words of the turn."""
    return self.before + _encode(tokenizer, words)


def _encode(tokenizer, text):
  """Encodes a text without the tokenizer's BOS; control tokens are parsed."""
  num_added = len(tokenizer.encode(''))
  return tuple(tokenizer.encode(text, parse_special=True)[num_added:])
