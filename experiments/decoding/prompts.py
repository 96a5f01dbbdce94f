"""Prompts from a file: Spec-Bench's format, JSON lines, or plain text.

  {"question_id": 81, "category": "writing", "turns": ["...", "..."]}
  {"prompt": "...", "id": "...", "category": "..."}     (the last two optional)
  one prompt per line

Blank lines are skipped. The later turns of a conversation are kept beside its
first one; `evaluate` decodes them too. A file is read as JSON lines if its
name says so (.jsonl, .json) or if it starts with a brace, and it may be
compressed by gzip.
"""

import dataclasses
import pathlib
import re
import reprlib
from typing import Any

from experiments.decoding import json_lines

NO_CATEGORY = 'none'
# Categories of tables: all prompts together, and the turns of conversations.
_RESERVED = re.compile(r'overall|turn \d+')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt and where it came from."""

  id: str
  category: str
  text: str
  line: int  # from 1
  reference: str | None = None  # what the answer is scored against
  next_turns: tuple[str, ...] = ()  # what the user says after the answers


def read(path: str, limit: int | None = None) -> list[Prompt]:
  """Reads the first `limit` prompts; None reads all.

  Raises:
    ValueError: the file cannot be read, or a prompt is invalid; the message
      names the file, the line and what is wrong with it.
  """
  prompts = _parse(path, _read_lines(path))
  if not prompts:
    raise ValueError(f'{path} has no prompts: write one per line')
  return prompts[:limit]


def name(path: str) -> str:
  """Returns the prompts' name in tables: the file's name without its suffix."""
  return pathlib.Path(_uncompressed(path)).stem


def is_json(path: str) -> bool:
  """Returns whether a file's name says that it holds JSON."""
  return pathlib.Path(_uncompressed(path)).suffix in ('.jsonl', '.json')


def _uncompressed(path: str) -> str:
  return path.removesuffix('.gz')


def _read_lines(path: str) -> list[str]:
  data = json_lines.content(path)
  try:
    return json_lines.lines(data)
  except ValueError as error:
    raise ValueError(f'--prompts={path}: {error}') from error


def _parse(path: str, lines: list[str]) -> list[Prompt]:
  numbered = [(i, line.strip()) for i, line in enumerate(lines, 1)]
  numbered = [(i, line) for i, line in numbered if line]
  if not (is_json(path) or (numbered and numbered[0][1].startswith('{'))):
    return [Prompt(str(i), NO_CATEGORY, line, i) for i, line in numbered]
  prompts = []
  for i, line in numbered:
    try:
      prompts.append(from_json(json_lines.value(line), i))
    except ValueError as error:
      raise ValueError(f'{path}, line {i}: {error}: correct it') from error
  return prompts


def from_json(record: Any, line: int) -> Prompt:
  """Returns the prompt in a record of JSON lines.

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
  category = record.get('category', NO_CATEGORY)
  if not isinstance(category, str) or _RESERVED.fullmatch(category):
    raise ValueError(
      f'"category" is {reprlib.repr(category)}: it must be a text other than '
      "'overall' and 'turn 1', 'turn 2', ..."
    )
  identity = record.get('question_id', record.get('id', line))
  first, *others = turns
  return Prompt(str(identity), category, first, line, next_turns=tuple(others))


def _check(name, text):
  if not isinstance(text, str) or not text.strip():
    raise ValueError(
      f'{name} is {reprlib.repr(text)}: it must be a text that is not empty'
    )
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(f'{name} holds half of a surrogate pair') from error
