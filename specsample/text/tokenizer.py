"""Text to token ids and back; `tokenizer_files` reads and writes tokenizers."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import operator
import re
import reprlib
import sys
import threading
from typing import Any

import tokenizers

from specsample.text import chat as chat_lib

# Tokens that end a turn, in the model families that have one; a configuration
# may name only the token that ends a document.
_END_OF_TURN = (
  *('<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<|end|>'),
  *('<end_of_turn>', '<turn|>', '<|return|>', '<|call|>'),
)
# In the format of templates that write this token, <|end|> only ends a message:
# an answer goes on in another channel.
_END_OF_CHANNELS = '<|return|>'
# The first of 65,536 characters that are nobody's but a program's own.
_FIRST_STAND_IN = 0x100000
# Larger than any id, but small enough for a backend.
_NO_TOKEN = 2**31 - 1
# Held while a backend's setting is changed and used to encode.
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
  """A tokenizer, which turns text into token ids and back.

  Attributes:
    backend: the tokenizer of package `tokenizers`; its post-processor decides
      whether a text of this family begins with the BOS token.
    end_ids: the ids that the model's configuration names as end tokens.
    named_tokens: tokens that a chat template knows by name: 'bos_token',
      'eos_token', 'unk_token', 'pad_token' and 'mask_token', those that the
      model has.
    chat_template: a jinja2 template; None if the model has none.
    chat_variables: variables of the template, unless a call gives others:
      Qwen3 thinks unless it is {'enable_thinking': False}.
  """

  backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
  end_ids: tuple[int, ...] = ()
  named_tokens: Mapping[str, str]
  chat_template: str | None = dataclasses.field(default=None, repr=False)
  chat_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def vocab_size(self) -> int:
    """The number of tokens; a model's embedding may have more rows."""
    return self.backend.get_vocab_size()

  @property
  def bos_id(self) -> int | None:
    """The id of the token that begins a text; None if there is none."""
    return self.backend.token_to_id(self.named_tokens.get('bos_token', ''))

  @property
  def mask_id(self) -> int | None:
    """The id of the token that stands for a masked one; None without one."""
    return self.backend.token_to_id(self.named_tokens.get('mask_token', ''))

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The ids of tokens that end a text or, with a chat template, a turn."""
    tokens = [self.named_tokens.get('eos_token', '')]
    template = self.chat_template or ''
    tokens += [token for token in _END_OF_TURN if token in template]
    if _END_OF_CHANNELS in tokens:
      tokens = [token for token in tokens if token != '<|end|>']
    ids = map(self.backend.token_to_id, tokens)
    return tuple(sorted({*self.end_ids, *(i for i in ids if i is not None)}))

  def encode(self, text: str, parse_special: bool = False) -> list[int]:
    """Returns the token ids of a text, after BOS if the model family uses it.

    No other special token is added. Control tokens spelled out in the text,
    such as <|im_end|>, are text like any other unless `parse_special`, so that
    untrusted input cannot end a turn.
    """
    # The post-processor may also add an end of text, which is not for a prompt.
    added = self.backend.encode('').ids
    bos = [i for i in added if i == self.bos_id]
    return bos + self._encode(text, parse_special)

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of token ids, which may come from an array.

    Bytes that are not UTF-8 become U+FFFD; ids past the vocabulary are dropped.
    """
    ids = _integers(ids)
    if min(ids, default=0) < 0:
      raise ValueError(f'token id {min(ids)} is negative: cut padding off')
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def message(self, ids: Iterable[int]) -> dict[str, str]:
    """Returns the assistant's message that an answer is, for the next turn.

    Thoughts are apart, as 'reasoning_content': each template decides which of
    them the next turn reads.
    """
    text = self.decode(ids, skip_special=False)
    thoughts, said = chat_lib.split_thoughts(text)
    if said != text:
      said = said.lstrip('\n')  # the line ends after the thoughts
    message = {'role': 'assistant', 'content': self._control.sub('', said)}
    if thoughts:
      message['reasoning_content'] = self._control.sub('', thoughts)
    return message

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """Renders messages {'role': ..., 'content': ...} with the chat template.

    With `add_generation_prompt` the text ends where the answer begins.
    `variables` are added to `chat_variables` for this call, {'tools': [...]}
    for one. `text.chat.render` says what else a message may have.
    """
    return self._chat(messages, add_generation_prompt, variables)

  def encode_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    parse_special: bool = False,
  ) -> list[int]:
    """Returns the token ids of `chat`, with BOS if the template writes it.

    Control tokens spelled out in a message are text like any other unless
    `parse_special`, so that no message can end its turn or open another one.
    """
    # While the template is rendered, a character stands for each of them.
    stand_ins: dict[str, str] = {}
    stand_in = lambda match: stand_ins.setdefault(
      match[0], chr(_FIRST_STAND_IN + len(stand_ins))
    )
    hide = functools.partial(self._hidden.sub, stand_in)
    spell = str if parse_special else hide
    text = self._chat(messages, add_generation_prompt, variables, spell)
    spelled = str.maketrans({char: token for token, char in stand_ins.items()})
    # Cut at the template's own control tokens, where the backend cuts too.
    ids: list[int] = []
    ordinary = ''
    for part in self._control.split(text):
      plain = part.translate(spelled)
      if plain == part:
        ordinary += part
      else:
        ids += self._encode(ordinary, True) + self._encode(plain, False)
        ordinary = ''
    return ids + self._encode(ordinary, True)

  def has_control_tokens(self, text: str) -> bool:
    """Returns whether a text spells out control tokens."""
    return self._control.search(text) is not None

  def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns each text's token ids, without BOS; control tokens are text."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
      raise ValueError(f'texts is {texts!r}: give a list of texts')
    checked = list(map(_checked, texts))
    with _lock:
      self.backend.encode_special_tokens = True
      found = self.backend.encode_batch(checked, add_special_tokens=False)
    return [encoding.ids for encoding in found]

  def _chat(self, messages, add_generation_prompt, variables, spell=str):
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
      variables={**self.chat_variables, **chat_lib.checked(variables)},
      spell=spell,
    )

  @functools.cached_property
  def _control(self) -> re.Pattern[str]:
    """Matches control tokens, as a group so that `split` keeps them."""
    added = self.backend.get_added_tokens_decoder().values()
    tokens = [token.content for token in added if token.special]
    # The longest comes first, as in the backend. Without any, nothing matches.
    tokens.sort(key=len, reverse=True)
    return re.compile(f'({"|".join(map(re.escape, tokens)) or "(?!)"})')

  @functools.cached_property
  def _hidden(self) -> re.Pattern[str]:
    """Matches control tokens, and the characters that stand for them."""
    stand_ins = f'[{chr(_FIRST_STAND_IN)}-{chr(sys.maxunicode)}]'
    return re.compile(f'{self._control.pattern}|{stand_ins}')

  def _encode(self, text, parse_special):
    text = _checked(text)
    with _lock:
      self.backend.encode_special_tokens = not parse_special
      return self.backend.encode(text, add_special_tokens=False).ids


def _integers(ids: Iterable[int]) -> list[int]:
  """Returns token ids as integers that a backend can take."""
  try:
    return [min(operator.index(i), _NO_TOKEN) for i in ids]
  except TypeError as error:
    raise ValueError(
      f'ids is {reprlib.repr(ids)}: give token ids, such as [1, 2, 3]'
    ) from error


def _checked(text: Any) -> str:
  """Returns a text; raises ValueError unless it is a `str` of characters."""
  if not isinstance(text, str):
    raise ValueError(
      f'text is {reprlib.repr(text)}: give a str (from bytes: bytes.decode())'
    )
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'text has {text[error.start]!r} at index {error.start}, a surrogate '
      'that stands for no character: leave it out, or read the text with '
      "errors='replace'"
    ) from error
  return text


def pieces(
  tokenizer: Tokenizer, ids: Iterable[int], skip_special: bool = True
) -> list[str]:
  """Returns the text that each token adds; joined, that of a `TextStream`.

  The text of a token that adds none is ''. A character that takes several
  tokens belongs to the last of them.
  """
  stream = TextStream(tokenizer, skip_special)
  found = [stream.push([token]) for token in _integers(ids)]
  if found:
    found[-1] += stream.finish()
  return found


def continuation(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
  """Returns what ids add to a text, with the leading space of the first token.

  `Tokenizer.decode` drops that space for vocabularies such as Llama 2's, as if
  a text began there.
  """
  before = tokenizer.encode('a')
  return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


class TextStream:
  """A stream of text from growing ids, given out once it can no longer change.

  The results of `push` and `finish`, joined, are `decode` of all ids; bytes of
  an unfinished character are held back. One exception: if a run of byte tokens
  (Llama 2, Gemma) is not valid text as a whole, `decode` makes every byte of it
  U+FFFD, but the stream only the bytes that are not part of a character.
  """

  # A character has up to four bytes, so at most three are unfinished.
  _MAX_HELD = 3

  def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
    self._decode = lambda ids: tokenizer.decode(ids, skip_special)
    # Put before later tokens, because the first token of a text may lose its
    # leading space.
    self._anchor = tokenizer.encode('a')
    self._window: list[int] = []
    self._num_given = 0

  def push(self, ids: Iterable[int]) -> str:
    """Takes in new tokens and returns the text that became final."""
    # One at a time: some tokenizers decode nothing from a run of byte tokens
    # that ends in an unfinished character.
    return ''.join(map(self._push, _integers(ids)))

  def finish(self) -> str:
    """Returns the rest, an unfinished character as U+FFFD, and starts anew."""
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
