"""What a chat template writes around turns, and which turns are answered."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from experiments.training_data import filters
from specsample import text as text_lib

Messages = Sequence[tuple[str, str]]  # (role, content)
# Text that no template contains.
_PLACEHOLDER = 'Here7Stands3The5Turn'


@dataclasses.dataclass(frozen=True)
class Template:
  """The token ids around the only user turn of a chat; neither is empty."""

  before: tuple[int, ...]  # everything before the turn
  after: tuple[int, ...]  # everything between the turn and the answer

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

  def to_json(self) -> dict[str, Any]:
    """Returns the tokens as JSON."""
    return {'before': list(self.before), 'after': list(self.after)}


def _encode(tokenizer, text):
  """Encodes a text without the tokenizer's BOS; control tokens are parsed."""
  num_added = len(tokenizer.encode(''))
  return tuple(tokenizer.encode(text, parse_special=True)[num_added:])


class UnfitError(Exception):
  """Raised for a turn that is not answered; says why in a few words."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Limits:
  """The limits of a conversation; it ends before a turn that exceeds them."""

  tokenizer: text_lib.Tokenizer  # the target's
  excluded: filters.Exclusion  # texts that no user turn may overlap
  max_prompt_tokens: int  # before an answer, including the chat template's
  max_answer_tokens: int  # of one answer
  max_turns: int  # the most answers in one conversation
  # Of ASCII characters in a user turn; 0 accepts every language.
  min_ascii_share: float

  def prompt(self, messages: Messages) -> list[int]:
    """Returns the tokens before the answer to the last message, a user's."""
    _, turn = messages[-1]
    if not turn.strip():
      raise UnfitError('turn is empty')
    if not all(self.is_plain(content) for _, content in messages):
      raise UnfitError('turn with control tokens or broken characters')
    if sum(c.isascii() for c in turn) < self.min_ascii_share * len(turn):
      raise UnfitError('turn of another script')
    if turn in self.excluded:
      raise UnfitError('turn excluded')
    try:
      found = self.encode(messages, add_generation_prompt=True)
    except ValueError as error:
      raise UnfitError('the chat template refuses the messages') from error
    if len(found) > self.max_prompt_tokens:
      raise UnfitError('turn too long')
    return found

  def encode(
    self, messages: Messages, add_generation_prompt: bool
  ) -> list[int]:
    """Returns the tokens of messages as the chat template renders them."""
    return self.tokenizer.encode_chat(
      [{'role': role, 'content': content} for role, content in messages],
      add_generation_prompt,
    )

  def is_plain(self, text: str) -> bool:
    """Returns whether a text has no control tokens and no broken characters."""
    return '\ufffd' not in text and not self.tokenizer.has_control_tokens(text)
