"""The journal of a training run.

The steps at the full learning rate have keys ('train', step) and ('held out',
step). The keys of a decay's steps begin with the decay itself, ('decay', first,
last, 'train', step), so that an abandoned decay is not part of a run that was
made longer. A 'segment' says with which code and on which machine the run
continued.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import time
from typing import Any

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.training import plan as plan_lib

TRAIN, HELD_OUT = 'train', 'held out'
_DECAY, _SEGMENT, _RESULT = 'decay', 'segment', 'result'
_HIDDEN = 'hidden vectors'

Plan = plan_lib.Plan
Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """The journal of a run, read and written by kind of record."""

  journal: journal_lib.Journal

  def get(self, plan: Plan, kind: str, step: int) -> dict[str, Any] | None:
    """Returns the values of a step, None if there are none yet."""
    return self.journal.get(_key(plan, kind, step))

  def add(
    self, plan: Plan, kind: str, step: int, values: dict[str, Any]
  ) -> None:
    """Records the values of a step."""
    self.journal.add(_key(plan, kind, step), values)

  def curve(self, plan: Plan, kind: str) -> list[dict[str, Any]]:
    """Returns the values of the steps at the full rate, then of the decay."""
    of_decay = self.journal.of(_DECAY, plan.decay_start, plan.num_steps, kind)
    return self.constant(kind) + of_decay

  def constant(self, kind: str) -> list[dict[str, Any]]:
    """Returns the values of the steps at the full rate."""
    return self.journal.of(kind)

  @property
  def taken(self) -> int:
    """The number of steps taken at the full rate."""
    reports = self.constant(TRAIN)
    return reports[-1]['step'] if reports else 0

  def stop(self, patience: int | None) -> int | None:
    """Returns the step at which patience ran out, None if it did not.

    `patience` is the number of evaluations without improvement.
    """
    best, count = -1.0, 0
    for found in self.constant(HELD_OUT):
      better = found['tokens_per_round'] > best
      best = max(best, found['tokens_per_round'])
      count = 0 if better else count + 1
      if count == patience:
        return found['step']
    return None

  @property
  def hidden(self) -> list[dict[str, Any]]:
    """The time spent computing the target's vectors, for each data set."""
    return self.journal.of(_HIDDEN)

  def add_hidden(self, digest: str, num_tokens: int, seconds: float) -> None:
    """Records that the vectors of a data set had to be computed."""
    if (_HIDDEN, digest) not in self.journal:
      values = {'tokens': num_tokens, 'seconds': round(seconds, 3)}
      self.journal.add((_HIDDEN, digest), values)

  @property
  def segments(self) -> list[dict[str, Any]]:
    """The parts of the run, one for each start of the command."""
    return self.journal.of(_SEGMENT)

  def begin_segment(self, step: int) -> None:
    """Records the code and the machine of the run from a step on."""
    values = {
      'first_step': step,
      'begun': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
      'code': environment.source(),
      **environment.describe(),
    }
    self.journal.add((_SEGMENT, len(self.segments)), values)

  @property
  def has_results(self) -> bool:
    """Whether the run has reached its end: only then may results be its own."""
    return bool(self.journal.of(_RESULT))

  def add_result(self, plan: Plan, step: int) -> None:
    """Notes that the weights of a step are about to be written as a result."""
    key = (_RESULT, plan.decay_start, plan.num_steps)
    if key not in self.journal:
      self.journal.add(key, {'step': step})


def seen(reports: Iterable[Values]) -> dict[int, int]:
  """Returns how many tokens of answers were seen up to each report, by step."""
  found: dict[int, int] = {}
  total = 0
  for report in reports:
    total += report['answer_tokens']
    found[report['step']] = total
  return found


def _key(plan: Plan, kind: str, step: int) -> tuple:
  if step <= plan.decay_start:
    return (kind, step)
  return (_DECAY, plan.decay_start, plan.num_steps, kind, step)
