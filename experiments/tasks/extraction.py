"""The part of an answer that is scored.

A plain model keeps writing after its answer; a chat model adds explanations.
"""

from collections.abc import Iterable, Iterator
import dataclasses
import re

from specsample import text as text_lib

# Where the completion of a function ends: Chen et al. 2107.03374, section 2.
CODE_STOPS = ('\nclass', '\ndef', '\n#', '\nif', '\nprint')

# The fence that opens a code block: on a line of its own, after a list marker,
# or at the end of a line of text. No backtick may follow a fence of backticks.
_FENCE = re.compile(
  r'([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?:\S.*[ \t](?=[`~]+\w*\s*$))?'
  r'(`{3,}(?!.*`)|~{3,})'
)
_FIRST_LINE_OF_CODE = re.compile(
  r'^(?:def |class |@|import \w|from \w+(?:\.\w+)* import )', re.MULTILINE
)


def cut(text: str, stops: Iterable[str]) -> str:
  """Returns the text before the first stop, or all of it if there is none."""
  ends = [text.find(stop) for stop in stops]
  return text[: min([end for end in ends if end >= 0], default=len(text))]


def spoken(answer: str) -> str:
  """Returns a chat model's answer without the thoughts before it.

  The result is empty if the answer was cut short while the model was thinking.
  """
  return text_lib.split_thoughts(answer)[1]


def final(answer: str, stops: Iterable[str], *, chat: bool) -> str:
  """Returns a chat's answer without its thoughts, or a plain text that is cut.

  A plain model's text ends before the first of `stops`; a chat ends by itself.
  """
  return spoken(answer) if chat else cut(answer, stops)


def code(answer: str, name: str) -> str:
  """Returns the code in a chat model's answer that defines function `name`.

  Models correct themselves, so this is the last fenced block that defines it; a
  block that is cut short counts only if no complete block does. Failing that,
  it is the first block with any function, or else the first block. Without any
  fence, it is the answer from the first line that looks like code, or all of
  the answer.
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
  """Returns a prompt that begins the function `name`, completed by an answer.

  A chat model's code may be the rest of the function, which is indented, or the
  whole function. Both are put after the prompt, because it has the imports and
  helpers that the function needs. A prompt is valid code on its own, because a
  docstring alone makes a function body.
  """
  if not chat:
    return prompt + cut(answer, CODE_STOPS)
  found = code(spoken(answer), name)
  continues = found.lstrip('\n').startswith((' ', '\t'))
  return prompt + ('' if continues else '\n') + found


@dataclasses.dataclass(frozen=True)
class _Block:
  """The content of a fenced block of code."""

  text: str
  is_closed: bool


def _blocks(answer: str) -> Iterator[_Block]:
  """Yields the fenced blocks, without the indentation of their list item."""
  lines = iter(answer.split('\n'))
  for line in lines:
    opening = _FENCE.match(line)
    if opening is None:
      continue
    indent, fence = opening.groups()
    inside: list[str] = []
    for line in lines:
      # A fence that is indented further is part of the code, as in a docstring.
      if _indent(line) <= len(indent) and line.lstrip().startswith(fence):
        yield _Block('\n'.join([*_outdent(inside, len(indent)), '']), True)
        break
      inside.append(line)
    else:
      yield _Block('\n'.join(_outdent(inside, len(indent))), False)


def _outdent(lines, most):
  """Removes the indentation that all lines share, at most `most` characters."""
  shared = min([most, *(_indent(line) for line in lines if line.strip())])
  return [line[shared:] for line in lines]


def _indent(line):
  return len(line) - len(line.lstrip())
