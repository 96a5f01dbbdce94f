"""MT-Bench and Spec-Bench: questions that speed is measured with.

Zheng et al. 2306.05685, 80 conversations of two turns; Xia et al. 2401.07851,
480 questions, of which 80 are MT-Bench's. Of a conversation the first turn is
taken, where Spec-Bench's own evaluation goes through all.
"""

from collections.abc import Sequence
import dataclasses
import reprlib

import gin

from experiments import prompts as prompts_lib
from experiments.tasks import source as source_lib
from experiments.tasks import task

# The categories of MT-Bench, which Spec-Bench's evaluation counts as one.
_MT_BENCH = (
  *('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction'),
  *('stem', 'humanities'),
)
_OTHERS = ('translation', 'summarization', 'qa', 'math_reasoning', 'rag')
_GROUPS = (
  *((name, 'mt_bench') for name in _MT_BENCH),
  *((name, name) for name in _OTHERS),
)
_FORM = '"question_id", "category" and "turns"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """Questions without a score."""

  name: str
  source: source_lib.Source
  why_unscored: str
  chat: bool = True
  # (category of the file, category of the table); empty to leave them.
  groups: tuple[tuple[str, str], ...] = ()

  def prompts(self) -> list[prompts_lib.Prompt]:
    """The first turns."""
    return [self._prompt(record) for record in self.source.read()]

  def provenance(self) -> source_lib.Provenance:
    """What `prompts` reads."""
    return self.source.provenance()

  def unscored(self) -> str:
    """Why answers are not scored."""
    return self.why_unscored

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[task.Score]:
    """No score."""
    del prompts, answers
    return []

  def _prompt(self, record):
    try:
      prompt = prompts_lib.from_json(record.values, record.line)
    except ValueError as error:
      raise self.source.error(f'line {record.line}: {error}') from error
    if not self.groups:
      return prompt
    groups = dict(self.groups)
    if prompt.category not in groups:
      raise self.source.error(
        f'line {record.line}: the category {reprlib.repr(prompt.category)} is '
        'none of ' + ', '.join(groups)
      )
    return dataclasses.replace(prompt, category=groups[prompt.category])


@gin.configurable
def mt_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """MT-Bench from a file of its questions, by its own eight categories."""
  return Questions(
    name='MT-Bench',
    source=source_lib.Source(
      task='MT-Bench',
      fields=(),
      remedy=_remedy(
        'fastchat/llm_judge/data/mt_bench/question.jsonl of '
        'github.com/lm-sys/FastChat',
        'mt_bench',
      ),
      path=path,
      sha256=(
        '119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7'
      ),
    ),
    why_unscored='MT-Bench is scored by a judge, a model that is not run here',
    chat=chat,
  )


@gin.configurable
def spec_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """Spec-Bench from a file of its questions, in its tables' six groups."""
  return Questions(
    name='Spec-Bench',
    source=source_lib.Source(
      task='Spec-Bench',
      fields=(),
      remedy=_remedy(
        'data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench',
        'spec_bench',
      ),
      path=path,
      sha256=(
        '4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04'
      ),
    ),
    why_unscored='Spec-Bench measures speed, and has no score of answers',
    chat=chat,
    groups=_GROUPS,
  )


def _remedy(origin: str, name: str) -> str:
  return (
    f"""download {origin}; --gin_bindings='{name}.path = "FILE"' names it """
    f'(JSON lines with {_FORM})'
  )
