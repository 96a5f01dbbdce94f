"""What of an answer is scored: models write on, and chat models explain."""

from collections.abc import Iterable
import re

# Where the completion of a function ends: Chen et al. 2107.03374, section 2.
CODE_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')

# A fence may be indented, as in a list; its block is then indented as far.
_BLOCK = re.compile(
  r'^(?P<indent>[ \t]*)(?P<fence>```|~~~)[^\n]*\n(?P<code>.*?)'
  r'(?:^(?P=indent)?(?P=fence)|\Z)',
  re.MULTILINE | re.DOTALL,
)
# A template may have opened it in the prompt; of one cut short nothing is left.
_THOUGHT = re.compile(r'\A(?:.*?</think>|\s*<think>.*)', re.DOTALL)
_FIRST_LINE_OF_CODE = re.compile(
  r'^(?:def |class |@|import \w|from \w+(?:\.\w+)* import )', re.MULTILINE
)


def cut(text: str, stops: Iterable[str]) -> str:
  """The text before the first of the stops."""
  ends = [text.find(stop) for stop in stops]
  return text[: min([end for end in ends if end >= 0], default=len(text))]


def code(answer: str, name: str) -> str:
  """The code of a chat model's answer, which is to define a function.

  Behind what the model thought before it answered, that is the first fenced
  block that defines the function of that name, or else one that defines any, or
  else the first block; without a fence what follows the first line that begins
  as code does, or else all of it. An answer that was cut short may leave its
  fence open.
  """
  answer = _THOUGHT.sub('', answer)
  blocks = [_dedented(**found.groupdict()) for found in _BLOCK.finditer(answer)]
  for wanted in (rf'def {name}\b', 'def ', ''):
    for block in blocks:
      if re.search(wanted, block):
        return block
  first = _FIRST_LINE_OF_CODE.search(answer)
  return answer[first.start() :] if first else answer


def _dedented(indent: str, fence: str, code: str) -> str:
  del fence
  lines = code.splitlines(keepends=True)
  return ''.join(line.removeprefix(indent) for line in lines)


def program(prompt: str, answer: str, name: str, *, chat: bool) -> str:
  """The function that a prompt begins, as an answer completes it.

  A chat model's code may be the rest of the function, which is indented, or all
  of it. That is put behind the prompt, which has the imports and what else the
  function calls, and which is a function even with its docstring alone.
  """
  if not chat:
    return prompt + cut(answer, CODE_STOPS)
  found = code(answer, name)
  continues = found.lstrip('\n').startswith((' ', '\t'))
  return prompt + ('' if continues else '\n') + found
