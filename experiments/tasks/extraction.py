"""What of an answer is scored: models write on, and chat models explain."""

from collections.abc import Iterable
import re

# Where the completion of a function ends: Chen et al. 2107.03374, section 2.
CODE_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')

_BLOCK = re.compile(r'^```[^\n]*\n(.*?)(?:^```|\Z)', re.MULTILINE | re.DOTALL)
_FIRST_LINE_OF_CODE = re.compile(
  r'^(?:def |class |@|import \w|from \w+(?:\.\w+)* import )', re.MULTILINE
)


def cut(text: str, stops: Iterable[str]) -> str:
  """The text before the first of the stops."""
  ends = [text.find(stop) for stop in stops]
  return text[: min([end for end in ends if end >= 0], default=len(text))]


def code(answer: str) -> str:
  """The code of a chat model's answer.

  That is the first fenced block that defines a function, or else the first
  block; without a fence what follows the first line that begins as code does,
  or else all of it. An answer that was cut short may leave its fence open.
  """
  blocks = _BLOCK.findall(answer)
  if blocks:
    return next((block for block in blocks if 'def ' in block), blocks[0])
  first = _FIRST_LINE_OF_CODE.search(answer)
  return answer[first.start() :] if first else answer


def program(prompt: str, answer: str, *, chat: bool) -> str:
  """The function that a prompt begins, as an answer completes it.

  A chat model's code may be the rest of the function, which is indented, or all
  of it. That is put behind the prompt, which has the imports and what else the
  function calls, and which is a function even with its docstring alone.
  """
  if not chat:
    return prompt + cut(answer, CODE_STOPS)
  found = code(answer)
  continues = found.lstrip('\n').startswith((' ', '\t'))
  return prompt + ('' if continues else '\n') + found
