"""Files of conversations and of prompts, in every format that people have them.

  {"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}
  {"messages": [{"role": "user", "content": "..."}, ...], "temperature": 0}
  {"question_id": 81, "category": "writing", "turns": ["...", "..."]}
  {"prompt": "...", "id": "...", "category": "..."}     (the last two optional)
  one prompt per line

These are ShareGPT's, OpenAI's and Spec-Bench's formats; "turns" are the user's.
Records form one JSON array or are JSON lines, which a file holds if its name
says so (.jsonl, .json) or if it starts with a brace. It may be compressed by
gzip. A damaged or truncated file is read as far as possible, and `File.lost`
says how much is missing. Records and parts of a conversation that cannot be
used are left out and counted.
"""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import reprlib
from typing import Any

from experiments.decoding import json_lines

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
_ARRAY = re.compile(rb'\s*\[\s*(\{|\]|$)')


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
  num_read: int = 0  # conversations, including skipped ones
  num_turns: int = 0  # user turns in all of these
  left_out: dict[str, int] = dataclasses.field(default_factory=dict)
  fault: str | None = None  # of the first record that is no conversation
  lost: str | None = None  # what is missing from a damaged file, and where

  def summary(self) -> str:
    """Returns one line that says what was read and what was left out."""
    counts = ', '.join(f'{n:,} {why}' for why, n in self.left_out.items())
    first = f', first {self.fault}' if self.fault else ''
    return (
      f'{self.path}: {self.num_read:,} conversations, {self.num_turns:,} user '
      f'turns; {counts or "all of them are used"}{first}'
    )

  def to_json(self) -> dict[str, Any]:
    """Returns what a manifest says about the file."""
    return {
      'name': pathlib.Path(self.path).name,
      'conversations': self.num_read,
      'user_turns': self.num_turns,
      'left_out': self.left_out,
      'lost': self.lost,
    }


def digest(conversations: Sequence[Conversation]) -> str:
  """Returns a hexadecimal digest of what the conversations contain."""
  content = [
    (x.messages, x.temperature, x.finish_reason, x.num_tokens)
    for x in conversations
  ]
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read(path: str) -> File:
  """Reads a file.

  Raises:
    ValueError: if the file cannot be read or has no user turn; names the file,
      the first record that is no conversation, and the remedy.
  """
  reader = _Reader(path)
  data, damage = json_lines.unpacked_until(json_lines.content(path))
  try:
    data = json_lines.as_utf8(data)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  if _ARRAY.match(data):
    found = list(reader.array(data))
  else:
    if damage:  # the last line is incomplete
      data = data[: data.rfind(b'\n') + 1]
    found = list(reader.lines(data))
  if damage:
    reader.lost = (
      f'{path} is damaged ({damage}): the {reader.num_read:,} conversations '
      'before the damage are used'
    )
  if not found:
    left_out = ', '.join(f'{n:,} {why}' for why, n in reader.left_out.items())
    raise ValueError(
      f'{reader.lost or path}: there is no prompt and no conversation with a '
      f'user turn ({reader.fault or left_out or "the file is empty"}): '
      'docs/training.md has the formats'
    )
  return File(
    path=path,
    conversations=found,
    num_read=reader.num_read,
    num_turns=reader.num_turns,
    left_out=dict(sorted(reader.left_out.items())),
    fault=reader.fault,
    lost=reader.lost,
  )


def _is_json(path: str) -> bool:
  """Returns whether a file's name says that it holds JSON."""
  return pathlib.Path(uncompressed(path)).suffix in ('.jsonl', '.json')


def uncompressed(path: str) -> str:
  """Returns what a file is called without the mark of its compression."""
  return path.removesuffix('.gz')


class _UnfitError(Exception):
  """Raised for a message that cannot be used; says why."""


class _Reader:
  """A reader that counts what it leaves out."""

  def __init__(self, path: str):
    self._path = path
    self.num_read = 0
    self.num_turns = 0
    self.left_out: collections.Counter[str] = collections.Counter()
    self.fault: str | None = None
    self.lost: str | None = None

  def array(self, data: bytes) -> Iterator[Conversation]:
    """Yields the conversations of a JSON array up to where it is damaged."""
    try:
      for place, record in enumerate(json_lines.array(data), 1):
        yield from self._record(record, place, f'record {place}')
    except json_lines.BreakError as error:
      self.lost = (
        f'{self._path} is cut off or damaged after {self.num_read:,} '
        f'conversations ({error}): the {error.num_bytes:,} bytes after them, '
        f'{error.num_bytes / len(data):.2%}, are not used'
      )

  def lines(self, data: bytes) -> Iterator[Conversation]:
    """Yields the conversations of JSON lines, or the lines of a plain text."""
    # Bytes that are not UTF-8 become surrogates. Not splitlines, which would
    # also split at a form feed inside a text.
    split = data.decode(errors='surrogateescape').split('\n')
    numbered = [(i, x.strip()) for i, x in enumerate(split, 1) if x.strip()]
    is_text = not (
      _is_json(self._path) or (numbered and numbered[0][1].startswith('{'))
    )
    damaged: list[str] = []
    for i, line in numbered:
      try:
        record = {'prompt': line} if is_text else json_lines.value(line)
      except ValueError as error:
        damaged.append(f'line {i}: {error}')
        continue
      yield from self._record(record, i, f'line {i}')
    if damaged:
      self.lost = (
        f'{self._path}, {damaged[0]}: {len(damaged):,} of {len(numbered):,} '
        'lines are damaged and not used'
      )

  def _record(
    self, record: Any, place: int, where: str
  ) -> Iterator[Conversation]:
    """Yields the conversation of a record, or nothing if it has none."""
    self.num_read += 1
    try:
      raw = _raw_messages(record)
      if raw is None:
        found = of_prompts(record, place)
        self.num_turns += len(found.messages)
        yield found
        return
      category = _category(record)
    except ValueError as error:
      self.left_out['skipped (no conversation)'] += 1
      self.fault = self.fault or f'{where}: {error}'
      return
    roles = [_role(message) for message in raw]
    self.num_turns += roles.count(USER)
    # ShareGPT's long conversations were split, often right before an answer.
    first = next((i for i, x in enumerate(roles) if x == USER), len(roles))
    start = next((i for i in range(first) if roles[i] == ASSISTANT), first)
    if start < first < len(roles):
      self.left_out['begin with an answer, which is left out'] += 1
    messages, fault = _in_turn(raw[:start] + raw[first:])
    if first == len(roles):
      fault = 'no turn of a user'
    if not any(role == USER for role, _ in messages):
      self.left_out[f'skipped ({fault})'] += 1
      return
    if fault:
      self.left_out[f'cut short ({fault})'] += 1
    try:
      yield _chat(record, messages, raw[-1], not fault, place, category)
    except _UnfitError as error:
      self.left_out[f'skipped ({error})'] += 1


def _raw_messages(record):
  """Returns the messages as they are in the file, or None for a prompt."""
  for name in ('conversations', 'messages'):
    if isinstance(record, dict) and name in record:
      if not isinstance(record[name], list):
        raise ValueError(f'"{name}" must be a list of messages')
      return record[name]
  return None


def of_prompts(record: Any, place: int) -> Conversation:
  """Returns the conversation of a record that has only the user's turns.

  Raises:
    ValueError: the record is invalid; the message says what is wrong with it.
  """
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
    _check('the prompt' if number == 1 else f'turn {number}', turn)
  return Conversation(
    messages=tuple((USER, turn) for turn in turns),
    id=str(record.get('question_id', record.get('id', place))),
    place=place,
    category=_category(record),
  )


def _check(name, text):
  if not isinstance(text, str) or not text.strip():
    raise ValueError(
      f'{name} is {reprlib.repr(text)}: it must be a text that is not empty'
    )
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'{name} has {_broken(error)}') from error


def _broken(error):
  """Returns what is wrong with a character that has no UTF-8 encoding."""
  if 0xDC80 <= ord(error.object[error.start]) <= 0xDCFF:  # `surrogateescape`
    return (
      'bytes that are not UTF-8: save the file as UTF-8, as '
      '`iconv -f latin1 -t utf-8` does'
    )
  return 'half of a surrogate pair'


def _chat(record, messages, last, whole, place, category) -> Conversation:
  """Returns the conversation made of messages whose roles alternate."""
  temperature = record.get('temperature')
  if temperature is not None and not (
    isinstance(temperature, int | float)
    and not isinstance(temperature, bool)
    and 0 <= temperature < math.inf
  ):
    raise _UnfitError('"temperature" is not a number of at least 0')
  reason = record.get('finish_reason')
  if isinstance(last, dict):
    reason = last.get('finish_reason', reason)
  num_tokens = record.get('num_tokens')
  num_answers = sum(role == ASSISTANT for role, _ in messages)
  is_count = isinstance(num_tokens, int) and num_answers == 1
  return Conversation(
    messages=tuple(messages),
    id=str(record.get('id', place)),
    place=place,
    category=category,
    temperature=temperature,
    finish_reason=reason if whole and isinstance(reason, str) else None,
    num_tokens=num_tokens if is_count else None,
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
  try:
    content.encode()
  except UnicodeEncodeError as error:
    raise _UnfitError(f'a message with {_broken(error)}') from error
  return role, content
