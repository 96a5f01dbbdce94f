"""MT-Bench, Spec-Bench and SPEED-Bench: questions for measuring speed.

Zheng et al. 2306.05685, 80 conversations of two turns; Xia et al. 2401.07851,
480 questions, of which 80 are MT-Bench's; Abramovich et al. 2604.09557, 880
questions for acceptance and 1,536 per input length for throughput.
"""

from collections.abc import Mapping
import dataclasses
import reprlib

import gin

from experiments.decoding import prompts as prompts_lib
from experiments.tasks import source as source_lib
from experiments.tasks import task

_MT_BENCH = (
  *('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction'),
  *('stem', 'humanities'),
)
_SPEC_BENCH = ('translation', 'summarization', 'qa', 'math_reasoning', 'rag')
_SUBSETS = (
  'qualitative',
  *(f'throughput_{thousands}k' for thousands in (1, 2, 8, 16, 32)),
)
_FORM = (
  ' ("question_id", "category" and "turns"; --prompts=FILE reads other '
  'questions)'
)
# Stands in SPEED-Bench for a text that its licence keeps from being published.
_PLACEHOLDER = 'FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions(task.Task):
  """Questions without a score: all that were published, or some of them."""

  source: source_lib.Source
  # The categories and the groups that tables show; empty if any may occur.
  groups: Mapping[str, str]
  why_unscored: str
  chat: bool = True

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns the questions, with all turns of the user."""
    prompts = [self._prompt(record) for record in self.source.read()]
    lines: dict[str, int] = {}
    for prompt in prompts:
      first = lines.setdefault(prompt.id, prompt.line)
      if first != prompt.line:
        raise self.source.error(
          f'line {prompt.line}: question {prompt.id} is also on line {first}'
        )
    return prompts

  def unscored(self) -> str:
    """Returns why answers are not scored."""
    return self.why_unscored

  def _prompt(self, record):
    try:
      prompt = prompts_lib.of_prompts(record.values, record.line)
    except ValueError as error:
      raise self.source.error(f'line {record.line}: {error}') from error
    if not self.groups:
      return prompt
    if prompt.category not in self.groups:
      raise self.source.error(
        f'line {record.line}: the category {reprlib.repr(prompt.category)} is '
        f'not one of {", ".join(self.groups)}'
      )
    return dataclasses.replace(prompt, category=self.groups[prompt.category])


@gin.configurable
def mt_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """Returns MT-Bench from a file of its questions, in its eight categories."""
  source = _file(
    'MT-Bench',
    'mt_bench',
    path,
    'fastchat/llm_judge/data/mt_bench/question.jsonl of '
    'github.com/lm-sys/FastChat',
    '119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7',
  )
  groups = {name: name for name in _MT_BENCH}
  why = 'MT-Bench is scored by a judge, a model that is not run here'
  return Questions(source=source, groups=groups, why_unscored=why, chat=chat)


@gin.configurable
def spec_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """Returns Spec-Bench from a file of its questions, in its six groups."""
  source = _file(
    'Spec-Bench',
    'spec_bench',
    path,
    'data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench',
    '4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04',
  )
  # MT-Bench's questions form one group.
  groups = dict.fromkeys(_MT_BENCH, 'mt_bench')
  groups |= {name: name for name in _SPEC_BENCH}
  why = 'Spec-Bench measures speed, and has no score of answers'
  return Questions(source=source, groups=groups, why_unscored=why, chat=chat)


def _file(name, configurable, path, file, sha256) -> source_lib.Source:
  return source_lib.Source(
    task=name,
    configurable=configurable,
    fields=(),
    origin=f'download {file}{_FORM}',
    path=path,
    sha256=sha256,
  )


@gin.configurable
def speed_bench(
  *,
  subset: str = 'qualitative',
  path: str | None = None,
  revision: str | None = None,
  chat: bool = True,
) -> Questions:
  """Returns a subset of SPEED-Bench, from the hub or from a file.

  The hub has only a placeholder for many of the questions; these are left out,
  and counted. The benchmark's own script, which docs/evaluation.md names, puts
  the texts in their place; the result is read as a file of JSON lines.

  The questions of the subsets 'throughput_1k' to 'throughput_32k' have about
  1,000 to 32,000 tokens. Without a path the subset is read from the hub, by
  default the newest revision.
  """
  if subset not in _SUBSETS:
    raise ValueError(
      f'speed_bench.subset is {subset!r}: choose one of {", ".join(_SUBSETS)}'
    )
  return Questions(
    source=source_lib.Source(
      task=f'SPEED-Bench {subset}',
      configurable='speed_bench',
      fields=(),
      origin='download nvidia/SPEED-Bench from the hub' + _FORM,
      path=path,
      hub=source_lib.Subset('nvidia/SPEED-Bench', subset, 'test', revision),
      placeholder=_PLACEHOLDER,
    ),
    groups={},
    why_unscored='SPEED-Bench measures speed, and has no score of answers',
    chat=chat,
  )
