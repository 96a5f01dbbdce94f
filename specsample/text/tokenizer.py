"""Between text and token ids; `tokenizer_files` reads and writes tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import threading
from typing import Any

import tokenizers

from specsample.text import chat as chat_lib

# Ends a turn in the families that have such a token; their configuration may
# name only the end of a document.
_END_OF_TURN = (
  '<|im_end|>',
  '<|eot_id|>',
  '<|eom_id|>',
  '<|end|>',
  '<end_of_turn>',
)
# A backend's setting and the encoding under it belong together.
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
  """Text to token ids and back.

  Attributes:
    backend: the tokenizer of package `tokenizers`; its post-processor says
      whether a text of this family begins with the BOS token.
    end_ids: the ids that the model's configuration names as ends.
    named_tokens: tokens that a chat template knows by name: 'bos_token',
      'eos_token', 'unk_token' and 'pad_token', as far as the model has them.
    chat_template: a jinja2 template, None where the model has none.
  """

  backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
  end_ids: tuple[int, ...] = ()
  named_tokens: Mapping[str, str]
  chat_template: str | None = dataclasses.field(default=None, repr=False)

  @property
  def vocab_size(self) -> int:
    """How many tokens there are; a model's embedding may have more rows."""
    return self.backend.get_vocab_size()

  @property
  def bos_id(self) -> int | None:
    """The token that begins a text."""
    return self.backend.token_to_id(self.named_tokens.get('bos_token', ''))

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end a text or, where there is a template, a turn."""
    tokens = [self.named_tokens.get('eos_token', '')]
    template = self.chat_template or ''
    tokens += [token for token in _END_OF_TURN if token in template]
    ids = map(self.backend.token_to_id, tokens)
    return tuple(sorted({*self.end_ids, *(i for i in ids if i is not None)}))

  def encode(self, text: str, parse_special: bool = False) -> list[int]:
    """Token ids of a text, behind BOS where the family has it so.

    No other special token is added. Control tokens spelled out in the text,
    such as <|im_end|>, are text like any other unless `parse_special`: input
    from elsewhere cannot end a turn.
    """
    # Of what the post-processor adds, an end of text is no part of a prompt.
    added = self.backend.encode('').ids
    bos = [i for i in added if i == self.bos_id]
    return bos + self._encode(text, parse_special)

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of token ids, which may be an array's.

    Bytes that are no UTF-8 become U+FFFD, ids past the vocabulary nothing.

    Raises:
      ValueError: a negative id.
    """
    ids = [int(i) for i in ids]
    if min(ids, default=0) < 0:
      raise ValueError(f'token id {min(ids)} is negative: cut padding off')
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def chat(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """Renders messages {'role': ..., 'content': ...} by the chat template.

    With `add_generation_prompt` the text ends where the answer begins. What a
    template asks for beside them are `variables`: Qwen3's thinks unless they
    are {'enable_thinking': False}.

    Raises:
      ValueError: no template, messages that it does not take, or a variable
        that every template is given already.
    """
    if self.chat_template is None:
      raise ValueError(
        'the model has no chat template: encode plain text, or load a model '
        'that was tuned for chat'
      )
    return chat_lib.render(
      self.chat_template,
      messages,
      add_generation_prompt=add_generation_prompt,
      named_tokens=self.named_tokens,
      variables=variables,
    )

  def encode_chat(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> list[int]:
    """Token ids of `chat`; BOS is there if the template writes it.

    Control tokens are parsed wherever they stand, inside a message too: check
    a text that must not hold any before making a message of it.
    """
    text = self.chat(messages, add_generation_prompt, variables)
    return self._encode(text, True)

  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without BOS, control tokens being text."""
    with _lock:
      self.backend.encode_special_tokens = True
      found = self.backend.encode_batch(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in found]

  def _encode(self, text, parse_special):
    with _lock:
      self.backend.encode_special_tokens = not parse_special
      return self.backend.encode(text, add_special_tokens=False).ids


def pieces(
  tokenizer: Tokenizer, ids: Iterable[int], skip_special: bool = True
) -> list[str]:
  """The text that each token adds; joined, they are that of a `TextStream`.

  '' for a token that adds none: a character of several tokens is the text of
  the last one.
  """
  stream = TextStream(tokenizer, skip_special)
  found = [stream.push([token]) for token in ids]
  if found:
    found[-1] += stream.finish()
  return found


def continuation(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
  """What ids add to a text: their first token keeps its leading space.

  Which `Tokenizer.decode` drops of a vocabulary such as Llama 2's, as if a text
  began there.
  """
  before = tokenizer.encode('a')
  return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


class TextStream:
  """Gives out the text of a growing sequence once it can no longer change.

  What `push` and `finish` return adds up to `decode` of all ids; the bytes of
  an unfinished character are held back. Where a run of byte tokens (Llama 2,
  Gemma) is no text as a whole, `decode` makes a U+FFFD of each byte of it, and
  the stream only of what is no character.
  """

  # A character has up to four bytes, so at most three are unfinished.
  _MAX_HELD = 3

  def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
    self._decode = lambda ids: tokenizer.decode(ids, skip_special)
    # Stands before later tokens, because the first token of a text may lose
    # its leading space.
    self._anchor = tokenizer.encode('a')
    self._window: list[int] = []
    self._num_given = 0

  def push(self, ids: Iterable[int]) -> str:
    """Takes in new tokens and returns the text that became final."""
    # One by one: of a run of byte tokens that ends in an unfinished character
    # some tokenizers decode nothing.
    return ''.join(self._push(int(i)) for i in ids)

  def finish(self) -> str:
    """Returns the rest, an unfinished character as U+FFFD; starts anew."""
    rest = self._decode(self._window)[self._num_given :]
    self._window, self._num_given = [], 0
    return rest

  def _push(self, token):
    self._window.append(token)
    text = self._decode(self._window)
    held = text[-self._MAX_HELD :]
    final = len(text) - len(held) + len(held.rstrip('\ufffd'))
    new = text[self._num_given : final]
    self._num_given = max(self._num_given, final)
    if text and final == len(text) and self._anchor:
      self._window = list(self._anchor)
      self._num_given = len(self._decode(self._anchor))
    return new
