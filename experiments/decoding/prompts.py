"""Prompts from a file; `conversations` has the formats.

The later turns of a conversation are kept beside its first one; `evaluate`
decodes them too, each after the method's own answers.
"""

import dataclasses
import pathlib
import reprlib
import sys

from experiments.decoding import conversations
from specsample import text as text_lib

NO_CATEGORY = conversations.NO_CATEGORY


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt and where it came from."""

  id: str
  category: str
  text: str
  line: int  # from 1, or the number in a JSON array
  reference: str | None = None  # what the answer is scored against
  next_turns: tuple[str, ...] = ()  # what the user says after the answers
  system: str | None = None  # the system message of a chat


def read(path: str, limit: int | None = None) -> list[Prompt]:
  """Reads the first `limit` prompts; None reads all.

  Says on stderr which parts of conversations cannot be used, if any.
  """
  file = conversations.read(path)
  if file.left_out:
    print(file.summary(), file=sys.stderr)
  return [of(found) for found in file.conversations[:limit]]


def name(path: str) -> str:
  """Returns the prompts' name in tables: the file's name without its suffix."""
  return pathlib.Path(path.removesuffix('.gz')).stem


def of(found: conversations.Conversation) -> Prompt:
  """Returns the user's part of a conversation."""
  first, *others = found.turns
  return Prompt(
    id=found.id,
    category=found.category,
    text=first,
    line=found.place,
    next_turns=tuple(others),
    system=found.system[0][1] if found.system else None,
  )


def encode(
  tokenizer: text_lib.Tokenizer,
  prompt: str,
  chat: bool,
  system: str | None = None,
) -> list[int]:
  """Returns the tokens of a prompt, plain or as the first turn of a chat."""
  if chat:
    first = [] if system is None else [{'role': 'system', 'content': system}]
    return tokenizer.encode_chat([*first, {'role': 'user', 'content': prompt}])
  if system is not None:
    raise ValueError(
      f'the prompt {reprlib.repr(prompt)} has a system message, but chat is '
      'False: set it to True, or leave the message out'
    )
  return tokenizer.encode(prompt)
