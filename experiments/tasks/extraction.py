"""What of an answer is scored: models write on, and chat models explain."""

from collections.abc import Iterable, Iterator
import dataclasses
import re

# Where the completion of a function ends: Chen et al. 2107.03374, section 2.
CODE_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')

# Before a block of code: alone, behind the mark of an item of a list, or at the
# end of a line of text. What stands behind backticks has none.
_FENCE = re.compile(
  r'([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?:\S.*[ \t](?=[`~]+\w*\s*$))?'
  r'(`{3,}(?!.*`)|~{3,})'
)
_FIRST_LINE_OF_CODE = re.compile(
  r'^(?:def |class |@|import \w|from \w+(?:\.\w+)* import )', re.MULTILINE
)
# Around what reasoning models think; a template may write the first itself.
_THOUGHT, _END_OF_THOUGHT = '<think>', '</think>'


def cut(text: str, stops: Iterable[str]) -> str:
  """The text before the first of the stops."""
  ends = [text.find(stop) for stop in stops]
  return text[: min([end for end in ends if end >= 0], default=len(text))]


def spoken(answer: str) -> str:
  """A chat model's answer without the thoughts before it.

  Cut short while it thinks, a model has answered nothing.
  """
  _, end, rest = answer.partition(_END_OF_THOUGHT)
  if end:
    return rest
  return '' if answer.lstrip().startswith(_THOUGHT) else answer


def code(answer: str, name: str) -> str:
  """The code of a chat model's answer that defines the function `name`.

  That is the last fenced block that does, since models correct themselves, but
  one that is cut short only where no other does. Or else it is the first block
  with any function, or the first at all; without a fence, what follows the
  first line that begins as code does, or all of the answer.
  """
  blocks = list(_blocks(answer))
  if not blocks:
    first = _FIRST_LINE_OF_CODE.search(answer)
    return answer[first.start() :] if first else answer
  definition = re.compile(rf'^(?:async )?def {name}\b', re.MULTILINE)
  defining = [block for block in blocks if definition.search(block.text)]
  closed = [block for block in defining if block.is_closed]
  functions = [block for block in blocks if 'def ' in block.text]
  chosen = [*closed[-1:], *defining[-1:], *functions, *blocks]
  return chosen[0].text


def program(prompt: str, answer: str, name: str, *, chat: bool) -> str:
  """The function `name`, which a prompt begins, as an answer completes it.

  A chat model's code may be the rest of the function, which is indented, or all
  of it. That is put behind the prompt, which has the imports and what else the
  function calls, and which is a function even with its docstring alone.
  """
  if not chat:
    return prompt + cut(answer, CODE_STOPS)
  found = code(spoken(answer), name)
  continues = found.lstrip('\n').startswith((' ', '\t'))
  return prompt + ('' if continues else '\n') + found


@dataclasses.dataclass(frozen=True)
class _Block:
  """What is behind a fence."""

  text: str
  is_closed: bool


def _blocks(answer: str) -> Iterator[_Block]:
  """The fenced blocks; those of an item of a list are indented as it is."""
  lines = iter(answer.split('\n'))
  for line in lines:
    opening = _FENCE.match(line)
    if opening is None:
      continue
    indent, fence = opening.groups()
    inside: list[str] = []
    for line in lines:
      # Deeper it is a part of the code, such as of a docstring.
      if _indent(line) <= len(indent) and line.lstrip().startswith(fence):
        yield _Block('\n'.join([*_outdent(inside, len(indent)), '']), True)
        break
      inside.append(line)
    else:
      yield _Block('\n'.join(_outdent(inside, len(indent))), False)


def _outdent(lines, most):
  """Without the spaces that all begin with, so far as the fence has them."""
  shared = min([most, *(_indent(line) for line in lines if line.strip())])
  return [line[shared:] for line in lines]


def _indent(line):
  return len(line) - len(line.lstrip())
