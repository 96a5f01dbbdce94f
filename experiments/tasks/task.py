"""The protocol of a task: prompts, and how answers to them are scored."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import intervals
from experiments.tasks import source as source_lib

ACCURACY = 'accuracy'  # the name of a share of right answers


@dataclasses.dataclass(frozen=True)
class Score:
  """One score of a method's answers."""

  name: str  # as tables show it: 'ROUGE-2', 'pass@1'
  value: float  # 0 to 1
  ci95: list[float] | None  # for prompts like these: `intervals.of_shares`


class Task(Protocol):
  """A data set and its score, as a frozen dataclass.

  Making a task reads nothing and imports no optional package.
  """

  @property
  def name(self) -> str:
    """The name that tables show."""

  @property
  def chat(self) -> bool:
    """Whether a prompt is one user turn of a chat."""

  @property
  def source(self) -> source_lib.Source:
    """The data that `prompts` reads."""

  @property
  def score_names(self) -> tuple[str, ...]:
    """The names that `score` may return, whether or not it does here."""

  def prompts(self) -> list[prompts_lib.Prompt]:
    """Returns all prompts."""

  def unscored(self) -> str | None:
    """Returns why `score` returns nothing; None if it scores."""

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[Score]:
    """Scores each prompt's samples, at least one each; [] if `unscored`."""


def average(name: str, values: Sequence[float]) -> Score:
  """Returns the mean of the prompts' own scores, which are from 0 to 1."""
  shares = np.asarray(values, np.float64)
  return Score(name, float(shares.mean()), intervals.of_shares(shares))


def mean(
  name: str,
  prompts: Sequence[prompts_lib.Prompt],
  answers: Sequence[Sequence[str]],
  value: Callable[[str, str], float],
) -> Score:
  """Returns the mean value of answers, averaged over each prompt's samples.

  Args:
    name: the score's name.
    prompts: their references are texts.
    answers: the samples of each prompt.
    value: (reference, answer) -> a value from 0 to 1.
  """
  values = [
    sum(value(str(prompt.reference), text) for text in samples) / len(samples)
    for prompt, samples in zip(prompts, answers, strict=True)
  ]
  return average(name, values)
