"""Files of prompts and of conversations.

  {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}
  {"messages": [{"role": "user", "content": "..."}, ...], "temperature": 0}
  {"question_id": 81, "category": "writing", "turns": ["...", "..."]}
  {"prompt": "...", "id": "...", "category": "..."}     (the last two optional)
  one prompt per line

These are ShareGPT's, OpenAI's and Spec-Bench's formats; "turns" are the user's.
Records form one JSON array or are JSON lines, which a file holds if its name
says so (.jsonl, .json) or if it starts with a brace. It may be compressed by
gzip. A damaged record is an error; parts of a conversation that cannot be used
are left out and counted.
"""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import gzip
import hashlib
import itertools
import json
import math
import pathlib
import re
import reprlib
import sys
from typing import Any
import zlib

from specsample import text as text_lib

NO_CATEGORY = 'none'
# Categories of tables: all prompts together, and the turns of conversations.
_RESERVED = re.compile(r'overall|turn \d+')
SYSTEM, USER, ASSISTANT = 'system', 'user', 'assistant'
_ROLES = {
  **dict.fromkeys(('human', 'user'), USER),
  **dict.fromkeys(('gpt', 'chatgpt', 'bing', 'bard', 'assistant'), ASSISTANT),
  **dict.fromkeys(('system', 'developer'), SYSTEM),
}
# How a JSON array of records begins; other texts may begin with a bracket.
_ARRAY = re.compile(r'\s*\[\s*(\{|\]|$)')
_SURROGATE = re.compile('[\ud800-\udfff]')
_GZIP = b'\x1f\x8b'  # how a gzip file begins, whatever its name


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What a user says, and the answers that a file may already have.

  `evaluate` decodes the later turns too, each after the method's own answers.
  No text is blank.
  """

  id: str
  category: str
  text: str  # the user's first turn
  line: int  # from 1, or the number in a JSON array
  reference: str | None = None  # what the answer is scored against
  next_turns: tuple[str, ...] = ()  # what the user says after the answers
  system: str | None = None  # the system message of a chat
  answers: tuple[str, ...] = ()  # of a conversation: to all turns, or but one
  temperature: float | None = None  # of the answers
  finish_reason: str | None = None  # of the last answer
  num_tokens: int | None = None  # of the only answer, including its end

  @property
  def turns(self) -> tuple[str, ...]:
    """The user's turns."""
    return self.text, *self.next_turns

  @property
  def messages(self) -> tuple[tuple[str, str], ...]:
    """The role and the content of each message."""
    found = [] if self.system is None else [(SYSTEM, self.system)]
    for turn, answer in itertools.zip_longest(self.turns, self.answers):
      found.append((USER, turn))
      found += [] if answer is None else [(ASSISTANT, answer)]
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class File:
  """The conversations of a file, and counts of what cannot be used."""

  path: str
  conversations: Sequence[Prompt]
  left_out: dict[str, int]

  @property
  def num_turns(self) -> int:
    """The number of the user's turns."""
    return sum(len(x.turns) for x in self.conversations)

  def summary(self) -> str:
    """Returns one line that says what was read and what was left out."""
    return (
      f'{self.path}: {len(self.conversations):,} conversations, '
      f'{self.num_turns:,} user turns; '
      f'{_joined(self.left_out) or "all of them are used"}'
    )

  def to_json(self) -> dict[str, Any]:
    """Returns what a manifest says about the file."""
    return {
      'name': pathlib.Path(self.path).name,
      'conversations': len(self.conversations),
      'user_turns': self.num_turns,
      'left_out': self.left_out,
    }


def digest(conversations: Sequence[Prompt]) -> str:
  """Returns a hexadecimal digest of what the conversations contain."""
  content = [
    (x.messages, x.temperature, x.finish_reason, x.num_tokens)
    for x in conversations
  ]
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_conversations(path: str) -> File:
  """Reads a file of conversations or of prompts."""
  found: list[Prompt] = []
  left_out: collections.Counter[str] = collections.Counter()
  for where, place, record in _records(path):
    try:
      raw = _raw_messages(record)
      if raw is None:
        found.append(of_prompts(record, place))
      else:
        found += _chat(record, raw, place, left_out)
    except ValueError as error:
      raise ValueError(f'{where}: {error}: correct it') from error
  if not found:
    raise ValueError(
      f'{path}: there is no prompt and no conversation with a user turn '
      f'({_joined(left_out) or "the file is empty"}): docs/training.md has the '
      'formats'
    )
  return File(
    path=path, conversations=found, left_out=dict(sorted(left_out.items()))
  )


def unpacked(data: bytes) -> bytes:
  """Returns the content of a file, decompressed if it is a gzip file."""
  if not data.startswith(_GZIP):
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'it is damaged ({error}); get it again') from error


def text(data: bytes) -> str:
  """Returns the text of a file, which may be compressed by gzip."""
  data = unpacked(data)
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    number = data.count(b'\n', 0, error.start) + 1
    raise ValueError(
      f'line {number} is not UTF-8: convert the file, as '
      '`iconv -f latin1 -t utf-8` does'
    ) from error


def lines(content: str) -> list[tuple[int, str]]:
  """Returns the lines that are not blank, each after its number from 1."""
  # Not splitlines, which would also split at a form feed inside a text.
  numbered = enumerate(content.split('\n'), 1)
  return [(i, line.strip()) for i, line in numbered if line.strip()]


def value(content: str) -> Any:
  """Returns the value of a line or a file of JSON."""
  try:
    return json.loads(content)
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{error.msg} (character {error.pos + 1:,} of what should be JSON)'
    ) from error
  except RecursionError as error:
    raise ValueError('it is nested too deeply') from error


def _joined(counts) -> str:
  return ', '.join(f'{n:,} {why}' for why, n in counts.items())


def _records(path: str) -> Iterator[tuple[str, int, Any]]:
  """Yields the records of a file, each after its place in words and its number.

  Damage is an error that begins with the place.
  """
  try:
    content = text(pathlib.Path(path).read_bytes())
  except OSError as error:
    raise ValueError(
      f'{path}: {error.strerror}: give a readable file'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  if _ARRAY.match(content):
    for place, record in enumerate(_value(content, path), 1):
      yield f'{path}, record {place}', place, record
    return
  suffix = pathlib.Path(path.removesuffix('.gz')).suffix
  is_json = suffix in ('.jsonl', '.json') or content.lstrip().startswith('{')
  for place, line in lines(content):
    where = f'{path}, line {place}'
    yield where, place, _value(line, where) if is_json else {'prompt': line}


def _value(content: str, where: str) -> Any:
  try:
    return value(content)
  except ValueError as error:
    raise ValueError(f'{where}: {error}: correct it') from error


def _raw_messages(record: Any) -> list[Any] | None:
  """Returns the messages as they are in the file, or None for a prompt."""
  for name in ('conversations', 'messages'):
    if isinstance(record, dict) and name in record:
      if not isinstance(record[name], list):
        raise ValueError(f'"{name}" must be a list of messages')
      return record[name]
  return None


def _chat(record, raw, place, left_out) -> list[Prompt]:
  """Returns [chat] up to its first unfit message, or [] if no turn is left.

  What is left out is counted in `left_out`.
  """
  category, temperature = _category(record), _temperature(record)
  roles = [_role(message) for message in raw]
  if USER not in roles:
    left_out['skipped (no turn of a user)'] += 1
    return []
  # ShareGPT's long conversations were split, often right before an answer.
  begin = roles.index(USER)
  if ASSISTANT in roles[:begin]:
    left_out['begin with an answer, which is left out'] += 1
    raw = raw[: roles.index(ASSISTANT)] + raw[begin:]
  messages, fault = _in_turn(raw)
  if not any(role == USER for role, _ in messages):
    left_out[f'skipped ({fault})'] += 1
    return []
  reason = record.get('finish_reason')
  if isinstance(raw[-1], dict):
    reason = raw[-1].get('finish_reason', reason)
  if fault:
    left_out[f'cut short ({fault})'] += 1
    reason = None  # it is about the last answer
  of_role = lambda role: tuple(x for one, x in messages if one == role)
  (first, *others), answers = of_role(USER), of_role(ASSISTANT)
  num_tokens = record.get('num_tokens')
  is_count = isinstance(num_tokens, int) and len(answers) == 1
  chat = Prompt(
    id=str(record.get('id', place)),
    category=category,
    text=first,
    line=place,
    next_turns=tuple(others),
    system=messages[0][1] if messages[0][0] == SYSTEM else None,
    answers=answers,
    temperature=temperature,
    finish_reason=reason if isinstance(reason, str) else None,
    num_tokens=num_tokens if is_count else None,
  )
  return [chat]


def _in_turn(raw) -> tuple[list[tuple[str, str]], str]:
  """Returns the messages before the first unfit one, and why it is unfit."""
  messages: list[tuple[str, str]] = []
  for message in raw:
    role, content = _role(message), _content(message)
    if role is None:
      return messages, 'unknown role'
    fault = ''
    if any(message.get(name) for name in ('tool_calls', 'function_call')):
      fault = 'tool call'
    elif not isinstance(content, str):
      fault = 'no text, or more than text'
    elif not content.strip():
      fault = 'empty turn'
    elif is_broken(content):
      fault = 'broken characters'
    elif messages and role in (messages[-1][0], SYSTEM):
      fault = 'roles out of order'
    if fault:
      return messages, fault
    messages.append((role, content))
  return messages, ''


def _role(message) -> str | None:
  """Returns the role, or None if it is unknown."""
  if not isinstance(message, dict):
    return None
  role = message.get('role', message.get('from'))
  return _ROLES.get(role) if isinstance(role, str) else None


def _content(message) -> Any:
  """Returns a message's text, or anything else if it is not text alone."""
  if not isinstance(message, dict):
    return None
  content = message.get('content', message.get('value'))
  if not isinstance(content, list):
    return content
  texts = [
    part['text']
    for part in content
    if isinstance(part, dict) and isinstance(part.get('text'), str)
  ]
  return ''.join(texts) if len(texts) == len(content) else None


def of_prompts(record: Any, place: int) -> Prompt:
  """Returns the conversation of a record that has only the user's turns."""
  if not isinstance(record, dict):
    raise ValueError('expected a JSON object with "prompt" or "turns"')
  if 'turns' in record:
    turns = record['turns']
    if not (isinstance(turns, list) and turns):
      raise ValueError('"turns" must be a list of at least one text')
  elif 'prompt' in record:
    turns = [record['prompt']]
  else:
    raise ValueError('it has neither "prompt" nor "turns"')
  for number, turn in enumerate(turns, 1):
    name = 'the prompt' if number == 1 else f'turn {number}'
    if not isinstance(turn, str) or not turn.strip():
      raise ValueError(
        f'{name} is {reprlib.repr(turn)}: it must be a text that is not empty'
      )
    if is_broken(turn):
      raise ValueError(f'{name} has half of a surrogate pair')
  return Prompt(
    id=str(record.get('question_id', record.get('id', place))),
    category=_category(record),
    text=turns[0],
    line=place,
    next_turns=tuple(turns[1:]),
  )


def is_broken(content: str) -> bool:
  """Returns whether a text holds a surrogate, which UTF-8 cannot encode."""
  return _SURROGATE.search(content) is not None


def _temperature(record) -> float | None:
  found = record.get('temperature')
  if found is None or (type(found) in (int, float) and 0 <= found < math.inf):
    return found
  raise ValueError(
    f'"temperature" is {reprlib.repr(found)}: it must be a number of at least 0'
  )


def _category(record) -> str:
  """Returns the category, which a data set may also call the source."""
  found = record.get('category', record.get('source'))
  if found is None:
    return NO_CATEGORY
  if type(found) in (int, float):
    return str(found)
  if not isinstance(found, str) or _RESERVED.fullmatch(found):
    raise ValueError(
      f'"category" is {reprlib.repr(found)}: it must be a text other than '
      "'overall' and 'turn 1', 'turn 2', ..."
    )
  return found


def read(path: str, limit: int | None = None) -> list[Prompt]:
  """Reads the first `limit` prompts; None reads all.

  Says on stderr which parts of conversations cannot be used, if any.
  """
  file = read_conversations(path)
  if file.left_out:
    print(file.summary(), file=sys.stderr)
  return list(file.conversations[:limit])


def name(path: str) -> str:
  """Returns the prompts' name in tables: the file's name without its suffix."""
  return pathlib.Path(path.removesuffix('.gz')).stem


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
