"""What a task is: prompts, and how answers to them are scored."""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from experiments.decoding import prompts as prompts_lib
from experiments.reporting import intervals
from experiments.tasks import source as source_lib


@dataclasses.dataclass(frozen=True)
class Score:
  """One score of a method's answers."""

  name: str  # as tables show it: 'ROUGE-2', 'pass@1'
  value: float  # 0 to 1
  ci95: list[float] | None  # of other prompts like these: `intervals.of_shares`


class Task(Protocol):
  """A data set and its score: a frozen dataclass.

  Nothing is read, and no package of an extra imported, when one is made.
  """

  @property
  def name(self) -> str:
    """As tables show it."""

  @property
  def chat(self) -> bool:
    """Whether a prompt is one user turn of a chat."""

  @property
  def score_names(self) -> tuple[str, ...]:
    """What `score` may give, whether or not it does here."""

  def prompts(self) -> list[prompts_lib.Prompt]:
    """All of them.

    Raises:
      ValueError: the data set is absent, empty or of another schema; the
        message says where to get it and how to name it.
    """

  def provenance(self) -> source_lib.Provenance:
    """What `prompts` reads; ValueError as there."""

  def unscored(self) -> str | None:
    """Why `score` gives nothing; None where it scores."""

  def score(
    self,
    prompts: Sequence[prompts_lib.Prompt],
    answers: Sequence[Sequence[str]],
  ) -> list[Score]:
    """Scores the samples of each prompt, at least one; [] where `unscored`."""


def average(name: str, values: Sequence[float]) -> Score:
  """The score that is the mean of the prompts' own, which are 0 to 1."""
  shares = np.asarray(values, np.float64)
  return Score(name, float(shares.mean()), intervals.of_shares(shares))
