"""Files of conversations and of prompts, in every format that people have them.

  {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}
  {"messages": [{"role": "user", "content": "..."}, ...], "temperature": 0}
  {"question_id": 81, "category": "writing", "turns": ["...", "..."]}
  {"prompt": "...", "id": "...", "category": "..."}     (the last two optional)
  one prompt per line

These are ShareGPT's, OpenAI's and Spec-Bench's formats; "turns" are the user's.
Records form one JSON array or are JSON lines, which a file holds if its name
says so (.jsonl, .json) or if it starts with a brace. It may be compressed by
gzip. Damaged records and parts of a conversation that cannot be used are left
out and counted; an array is read up to the first damaged record.
"""

import codecs
import collections
from collections.abc import Iterator, Sequence
import dataclasses
import gzip
import hashlib
import json
import math
import pathlib
import re
import reprlib
from typing import Any
import zlib

NO_CATEGORY = 'none'
# Categories of tables: all prompts together, and the turns of conversations.
_RESERVED = re.compile(r'overall|turn \d+')
SYSTEM, USER, ASSISTANT = 'system', 'user', 'assistant'
_ROLES = {
  **dict.fromkeys(('human', 'user'), USER),
  **dict.fromkeys(('gpt', 'chatgpt', 'bing', 'bard', 'assistant'), ASSISTANT),
  **dict.fromkeys(('system', 'developer'), SYSTEM),
}
_TOOL_ROLES = ('tool', 'function', 'function_call', 'observation')
_TOOL_FIELDS = ('tool_calls', 'function_call')
# How a JSON array of records begins; other texts may begin with a bracket.
_ARRAY = re.compile(r'\s*\[\s*(\{|\]|$)')
_NO_SEPARATOR = re.compile(r'[^\s,]')
_SURROGATE = re.compile('[\ud800-\udfff]')
_GZIP = b'\x1f\x8b'  # how a gzip file begins, whatever its name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
  """A chat between a user and an assistant, possibly after a system message.

  Records of prompts have only the user's turns.
  """

  messages: tuple[tuple[str, str], ...]  # (role, content), content not blank
  id: str
  place: int  # the line, or the number in the array; from 1
  category: str = NO_CATEGORY
  temperature: float | None = None  # of the answers
  finish_reason: str | None = None  # of the last answer
  num_tokens: int | None = None  # of the only answer, including its end

  @property
  def system(self) -> tuple[tuple[str, str], ...]:
    """The system message, if there is one."""
    return tuple(x for x in self.messages[:1] if x[0] == SYSTEM)

  @property
  def turns(self) -> list[str]:
    """The user's turns."""
    return [content for role, content in self.messages if role == USER]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class File:
  """The conversations of a file."""

  path: str
  conversations: Sequence[Conversation]
  num_read: int  # conversations, including skipped ones
  num_turns: int  # user turns in all of these
  left_out: dict[str, int]
  fault: str | None  # of the first record that is no conversation

  def summary(self) -> str:
    """Returns one line that says what was read and what was left out."""
    counts = _joined(self.left_out) or 'all of them are used'
    first = f', first {self.fault}' if self.fault else ''
    return (
      f'{self.path}: {self.num_read:,} conversations, {self.num_turns:,} user '
      f'turns; {counts}{first}'
    )

  def to_json(self) -> dict[str, Any]:
    """Returns what a manifest says about the file."""
    return {
      'name': pathlib.Path(self.path).name,
      'conversations': self.num_read,
      'user_turns': self.num_turns,
      'left_out': self.left_out,
    }


def digest(conversations: Sequence[Conversation]) -> str:
  """Returns a hexadecimal digest of what the conversations contain."""
  content = [
    (x.messages, x.temperature, x.finish_reason, x.num_tokens)
    for x in conversations
  ]
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read(path: str) -> File:
  """Reads a file."""
  try:
    content = text(pathlib.Path(path).read_bytes())
  except OSError as error:
    raise ValueError(
      f'{path}: {error.strerror}: give a readable file'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  found: list[Conversation] = []
  left_out: collections.Counter[str] = collections.Counter()
  fault = None
  num_read = num_turns = 0
  for where, place, record in _records(content, path):
    num_read += 1
    try:
      if isinstance(record, ValueError):
        raise record
      raw = _raw_messages(record)
      if raw is None:
        found.append(of_prompts(record, place))
        num_turns += len(found[-1].messages)
        continue
      found += _chat(record, raw, place, left_out)
      num_turns += sum(_role(message) == USER for message in raw)
    except ValueError as error:
      is_damaged = error is record
      why = 'damaged; an array ends there' if is_damaged else 'no conversation'
      left_out[f'skipped ({why})'] += 1
      fault = fault or f'{where}: {error}'
  if not found:
    reason = fault or _joined(left_out) or 'the file is empty'
    raise ValueError(
      f'{path}: there is no prompt and no conversation with a user turn '
      f'({reason}): docs/training.md has the formats'
    )
  return File(
    path=path,
    conversations=found,
    num_read=num_read,
    num_turns=num_turns,
    left_out=dict(sorted(left_out.items())),
    fault=fault,
  )


def uncompressed(path: str) -> str:
  """Returns what a file is called without the mark of its compression."""
  return path.removesuffix('.gz')


def unpacked(data: bytes) -> bytes:
  """Returns the content of a file, decompressed if it is a gzip file."""
  if not data.startswith(_GZIP):
    return data
  try:
    return gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    raise ValueError(f'it is damaged ({error}); get it again') from error


def text(data: bytes) -> str:
  """Returns the text of a file, which may be compressed by gzip.

  Bytes that are not UTF-8 become surrogates, which no valid text contains.
  """
  data = unpacked(data)
  if not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
    return data.decode('utf-8-sig', 'surrogateescape')
  try:
    return data.decode('utf-16')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'it begins as UTF-16 does, but is not ({error.reason} at byte '
      f'{error.start:,}): save it as UTF-8'
    ) from error


def lines(content: str) -> list[tuple[int, str]]:
  """Returns the lines that are not blank, each after its number from 1."""
  # Not splitlines, which would also split at a form feed inside a text.
  numbered = enumerate(content.split('\n'), 1)
  return [(i, line.strip()) for i, line in numbered if line.strip()]


def value(line: str) -> Any:
  """Returns the value of a line of JSON."""
  try:
    return json.loads(line)
  except (json.JSONDecodeError, RecursionError) as error:
    raise _damage(error) from error


def _damage(error: json.JSONDecodeError | RecursionError) -> ValueError:
  if isinstance(error, RecursionError):
    return ValueError('it is nested too deeply')
  return ValueError(
    f'{error.msg} (character {error.pos + 1:,} of what should be JSON)'
  )


def _joined(counts) -> str:
  return ', '.join(f'{n:,} {why}' for why, n in counts.items())


class _UnfitError(Exception):
  """Raised for a message that cannot be used; says why."""


def _records(content: str, path: str) -> Iterator[tuple[str, int, Any]]:
  """Yields the records of a file, each after its place in words and its number.

  A ValueError stands for a damaged record.
  """
  if _ARRAY.match(content):
    for place, record in enumerate(_array(content), 1):
      yield f'record {place}', place, record
    return
  suffix = pathlib.Path(uncompressed(path)).suffix
  is_json = suffix in ('.jsonl', '.json') or content.lstrip().startswith('{')
  for place, line in lines(content):
    try:
      found = value(line) if is_json else {'prompt': line}
    except ValueError as error:
      found = error
    yield f'line {place}', place, found


def _array(content: str) -> Iterator[Any]:
  """Yields the values of a JSON array, and a ValueError where it is damaged."""
  decoder = json.JSONDecoder()
  at = content.index('[') + 1
  while True:
    begin = _NO_SEPARATOR.search(content, at)
    at = begin.start() if begin else len(content)
    if content.startswith(']', at):
      return
    try:
      found, at = decoder.raw_decode(content, at)
    except (json.JSONDecodeError, RecursionError) as error:
      yield _damage(error)
      return
    yield found


def _chat(record, raw, place, left_out) -> list[Conversation]:
  """Returns [chat] up to its first unfit message, or [] if no turn is left.

  What is left out is counted in `left_out`.
  """
  category, temperature = _category(record), _temperature(record)
  roles = [_role(message) for message in raw]
  usable = raw
  # ShareGPT's long conversations were split, often right before an answer.
  first = roles.index(USER) if USER in roles else 0
  if ASSISTANT in roles[:first]:
    left_out['begin with an answer, which is left out'] += 1
    usable = raw[: roles.index(ASSISTANT)] + raw[first:]
  messages, fault = _in_turn(usable)
  if USER not in roles:
    fault = 'no turn of a user'
  if not any(role == USER for role, _ in messages):
    left_out[f'skipped ({fault})'] += 1
    return []
  reason = record.get('finish_reason')
  if isinstance(raw[-1], dict):
    reason = raw[-1].get('finish_reason', reason)
  if fault:
    left_out[f'cut short ({fault})'] += 1
    reason = None  # it is about the last answer
  num_tokens = record.get('num_tokens')
  num_answers = sum(role == ASSISTANT for role, _ in messages)
  is_count = isinstance(num_tokens, int) and num_answers == 1
  chat = Conversation(
    messages=tuple(messages),
    id=str(record.get('id', place)),
    place=place,
    category=category,
    temperature=temperature,
    finish_reason=reason if isinstance(reason, str) else None,
    num_tokens=num_tokens if is_count else None,
  )
  return [chat]


def _raw_messages(record):
  """Returns the messages as they are in the file, or None for a prompt."""
  for name in ('conversations', 'messages'):
    if isinstance(record, dict) and name in record:
      if not isinstance(record[name], list):
        raise ValueError(f'"{name}" must be a list of messages')
      return record[name]
  return None


def of_prompts(record: Any, place: int) -> Conversation:
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
      raise ValueError(
        f'{name} has bytes that are not UTF-8, or half of a surrogate pair: '
        'save it as UTF-8, as `iconv -f latin1 -t utf-8` does'
      )
  return Conversation(
    messages=tuple((USER, turn) for turn in turns),
    id=str(record.get('question_id', record.get('id', place))),
    place=place,
    category=_category(record),
  )


def is_broken(content: str) -> bool:
  """Returns whether a text holds a surrogate, which has no encoding.

  JSON can write one, and bytes that are not UTF-8 are read as one.
  """
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


def _in_turn(raw) -> tuple[list[tuple[str, str]], str | None]:
  """Returns the messages before the first unfit one, and why it is unfit."""
  messages: list[tuple[str, str]] = []
  for message in raw:
    try:
      role, content = _message(message)
    except _UnfitError as error:
      return messages, str(error)
    before = messages[-1][0] if messages else None
    if before == role or (role == SYSTEM and messages):
      return messages, 'roles out of order'
    messages.append((role, content))
  return messages, None


def _role(message) -> str | None:
  """Returns the role, or None if it is unknown."""
  if not isinstance(message, dict):
    return None
  role = message.get('role', message.get('from'))
  return _ROLES.get(role) if isinstance(role, str) else None


def _message(message) -> tuple[str, str]:
  """Returns a message's role and text."""
  role = _role(message)
  if not isinstance(message, dict):
    raise _UnfitError('a message that is not an object')
  if message.get('role', message.get('from')) in _TOOL_ROLES or any(
    message.get(name) for name in _TOOL_FIELDS
  ):
    raise _UnfitError('tool call')
  if role is None:
    raise _UnfitError('unknown role')
  content = message.get('content', message.get('value'))
  if isinstance(content, list):
    texts = [
      part['text']
      for part in content
      if isinstance(part, dict)
      and part.get('type') == 'text'
      and isinstance(part.get('text'), str)
    ]
    if len(texts) < len(content):
      raise _UnfitError('image or another part that is no text')
    content = ''.join(texts)
  if not isinstance(content, str):
    raise _UnfitError('a message without text')
  if not content.strip():
    raise _UnfitError('empty turn')
  if is_broken(content):
    raise _UnfitError('a message with broken characters')
  return role, content
