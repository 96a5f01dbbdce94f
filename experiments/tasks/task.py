"""Tasks: prompts, and how answers to them are scored."""

from collections.abc import Iterable, Sequence
import dataclasses
from typing import ClassVar, TYPE_CHECKING

import numpy as np

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import intervals
from experiments.tasks import source as source_lib
from specsample import text as text_lib


@dataclasses.dataclass(frozen=True)
class Score:
  """One score of a method's answers."""

  name: str  # as tables show it: 'ROUGE-2', 'pass@1'
  value: float  # 0 to 1
  ci95: list[float] | None  # for prompts like these: `intervals.of_shares`


class Task:
  """A data set and its score, as a frozen dataclass.

  Making a task reads nothing and imports no optional package.
  """

  # The names that `score` may return, whether or not it does here.
  score_names: ClassVar[tuple[str, ...]] = ()

  if TYPE_CHECKING:  # a field or a property

    @property
    def chat(self) -> bool:
      """Whether a prompt is one user turn of a chat."""

    @property
    def source(self) -> source_lib.Source:
      """The data that `prompts` reads."""

  @property
  def name(self) -> str:
    """The name that tables show."""
    return self.source.task

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns all prompts."""
    return [self._prompt(record) for record in self.source.read()]

  def unscored(self) -> str | None:
    """Returns why `score` returns nothing; None if it scores."""
    return None

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[Score]:
    """Scores each prompt's samples, at least one each; [] if `unscored`.

    By default this is the mean value of a prompt's samples, over all prompts.
    """
    if self.unscored():
      return []
    values = [
      sum(self._value(str(prompt.reference), text) for text in samples)
      / len(samples)
      for prompt, samples in zip(prompts, answers, strict=True)
    ]
    return [average(self.score_names[0], values)]

  def _prompt(self, record: source_lib.Record) -> prompts_lib.Prompt:
    raise NotImplementedError

  def _value(self, reference: str, answer: str) -> float:
    """Returns what an answer is worth, from 0 to 1."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problems(Task):
  """Problems with one right answer, scored by the share of right answers."""

  score_names: ClassVar[tuple[str, ...]] = ('accuracy',)
  # What a plain model reads, what a chat model is asked before the problem, and
  # where a plain model that keeps writing begins a problem of its own.
  plain: ClassVar[str]
  request: ClassVar[str]
  stops: ClassVar[tuple[str, ...]]

  path: str | None = None  # None reads from the hub
  revision: str | None = None  # of the hub's repository; None for the newest
  chat: bool = False

  def _prompt(self, record):
    """Returns a zero-shot prompt."""
    problem, answer = self.source.texts(record)
    text = self.plain.format(problem)
    if self.chat:
      text = f'{self.request}\n\n{problem}'
    return prompt(record, text, self._reference(record, answer))

  def _reference(self, record, answer: str) -> str:
    del record
    return answer

  def _value(self, reference, answer):
    answer = final(answer, self.stops, chat=self.chat)
    return self._is_right(reference, answer)

  def _is_right(self, reference: str, answer: str) -> bool:
    raise NotImplementedError


def prompt(
  record: source_lib.Record, text: str, reference: str, name: str = ''
) -> prompts_lib.Prompt:
  """Returns a record's prompt, named after its line by default."""
  return prompts_lib.Prompt(
    name or str(record.line),
    prompts_lib.NO_CATEGORY,
    text,
    record.line,
    reference,
  )


def average(name: str, values: Sequence[float]) -> Score:
  """Returns the mean of the prompts' own scores, which are from 0 to 1."""
  shares = np.asarray(values, np.float64)
  return Score(name, float(shares.mean()), intervals.of_shares(shares))


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
