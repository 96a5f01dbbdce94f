"""MT-Bench, Spec-Bench and SPEED-Bench: questions for measuring speed.

Zheng et al. 2306.05685, 80 conversations of two turns; Xia et al. 2401.07851,
480 questions, of which 80 are MT-Bench's; Abramovich et al. 2604.09557, 880
questions for acceptance and 1,536 per input length for throughput.
"""

from collections.abc import Sequence
import dataclasses
import reprlib

import gin

from experiments.decoding import conversations
from experiments.decoding import prompts as prompts_lib
from experiments.tasks import hub
from experiments.tasks import source as source_lib
from experiments.tasks import task


@dataclasses.dataclass(frozen=True)
class Category:
  """A category, and the properties that its published questions share."""

  name: str
  group: str  # the category that tables show
  ids: range
  turns: int


_MT_BENCH = tuple(
  Category(name, name, range(first, first + 10), 2)
  for first, name in zip(
    range(81, 161, 10),
    (
      *('writing', 'roleplay', 'reasoning', 'math', 'coding', 'extraction'),
      *('stem', 'humanities'),
    ),
    strict=True,
  )
)
# MT-Bench's questions form one group.
_SPEC_BENCH = (
  *(dataclasses.replace(one, group='mt_bench') for one in _MT_BENCH),
  *(
    Category(name, name, range(first, first + 80), 1)
    for first, name in zip(
      range(161, 561, 80),
      ('translation', 'summarization', 'qa', 'math_reasoning', 'rag'),
      strict=True,
    )
  ),
)
_FORM = '"question_id", "category" and "turns"'
_SUBSETS = (
  'qualitative',
  *(f'throughput_{thousands}k' for thousands in (1, 2, 8, 16, 32)),
)
# Stands in SPEED-Bench for a text that its licence keeps from being published.
_PLACEHOLDER = 'FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """Questions without a score: all that were published, or some of them."""

  name: str
  source: source_lib.Source
  categories: tuple[Category, ...]  # empty if any category may occur
  why_unscored: str
  chat: bool = True

  @property
  def score_names(self) -> tuple[str, ...]:
    """Empty, because answers are not scored."""
    return ()

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns the questions, with all turns of the user.

    Raises:
      ValueError: a question is not one of this benchmark's, or occurs twice.
    """
    prompts = [self._prompt(record) for record in self.source.read()]
    lines: dict[str, int] = {}
    for prompt in prompts:
      first = lines.setdefault(prompt.id, prompt.line)
      if first != prompt.line:
        raise self.source.error(
          f'line {prompt.line}: question {prompt.id} is also on line {first}'
        )
    return prompts

  def provenance(self) -> source_lib.Provenance:
    """Describes the data that `prompts` reads."""
    return self.source.provenance()

  def unscored(self) -> str:
    """Returns why answers are not scored."""
    return self.why_unscored

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[task.Score]:
    """Returns no score."""
    del prompts, answers
    return []

  def _prompt(self, record):
    try:
      prompt = prompts_lib.of(
        conversations.of_prompts(record.values, record.line)
      )
      if not self.categories:
        return prompt
      category = self._category(prompt.category)
      _check(category, record.values)
    except ValueError as error:
      raise self.source.error(f'line {record.line}: {error}') from error
    return dataclasses.replace(prompt, category=category.group)

  def _category(self, name):
    for category in self.categories:
      if category.name == name:
        return category
    names = ', '.join(category.name for category in self.categories)
    raise ValueError(f'the category {reprlib.repr(name)} is not one of {names}')


def _check(category, values):
  """Raises ValueError unless a record is a question of its category."""
  number, ids = values.get('question_id'), category.ids
  if not isinstance(number, int) or number not in ids:
    raise ValueError(
      f'"question_id" is {reprlib.repr(number)}, but the ids of '
      f'{category.name} are {ids[0]} to {ids[-1]}'
    )
  turns = values.get('turns')
  are_texts = isinstance(turns, list) and all(
    isinstance(turn, str) and turn.strip() for turn in turns
  )
  if not are_texts or len(turns) != category.turns:
    raise ValueError(
      f'"turns" is {reprlib.repr(turns)}, but {category.name} has '
      f'{category.turns} {"text" if category.turns == 1 else "texts"}'
    )


@gin.configurable
def mt_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """Returns MT-Bench from a file of its questions, in its eight categories."""
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
    categories=_MT_BENCH,
    why_unscored='MT-Bench is scored by a judge, a model that is not run here',
    chat=chat,
  )


@gin.configurable
def spec_bench(*, path: str | None = None, chat: bool = True) -> Questions:
  """Returns Spec-Bench from a file of its questions, in its six groups."""
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
    categories=_SPEC_BENCH,
    why_unscored='Spec-Bench measures speed, and has no score of answers',
    chat=chat,
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
  and counted. The benchmark's own script, which `docs/data.md` names, puts the
  texts in their place; the result is read as a file.

  Args:
    subset: 'qualitative', or 'throughput_1k' to 'throughput_32k', whose
      questions have about 1,000 to 32,000 tokens. A file is read whole.
    path: a file of JSON lines with the subset; None reads from the hub.
    revision: of the hub's repository; None for the newest.
    chat: whether a prompt is a turn of a chat.

  Raises:
    ValueError: there is no such subset.
  """
  if subset not in _SUBSETS:
    raise ValueError(
      f'speed_bench.subset is {subset!r}: choose one of {", ".join(_SUBSETS)}'
    )
  name = f'SPEED-Bench {subset}'
  return Questions(
    name=name,
    source=source_lib.Source(
      task=name,
      fields=(),
      remedy=_remedy('nvidia/SPEED-Bench from the hub', 'speed_bench'),
      path=path,
      hub=hub.Subset('nvidia/SPEED-Bench', subset, 'test', revision),
      placeholder=_PLACEHOLDER,
    ),
    categories=(),
    why_unscored='SPEED-Bench measures speed, and has no score of answers',
    chat=chat,
  )


def _remedy(origin: str, name: str) -> str:
  return (
    f"""download {origin}; --gin_bindings='{name}.path = "FILE"' names it """
    f'(JSON lines with {_FORM}), and --prompts=FILE reads other questions'
  )
