"""Rewards and losses of a run by steps, and the speed of each of its arms."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import gin
import numpy as np
import rich.text

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.reinforcement import arm as arm_lib
from experiments.reinforcement import reinforcement as reinforcement_lib
from experiments.reinforcement import trainer as trainer_lib
from experiments.reporting import columns
from experiments.reporting import figures
from experiments.reporting import intervals
from experiments.reporting import result_file
from experiments.reporting import tables

# The table of steps has at most this many lines.
_NUM_WINDOWS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
  """One step or several, as the arm that is learned from drew them."""

  steps: list[int]  # the first and the last one; they count from 1
  reward: float  # the mean over the answers
  tokens_per_round: float
  acceptance: float | None  # kept drafts over judged ones, if there were any
  tokens_per_s: float  # of the rollouts; compilation counts
  # The mean over steps of the loss of each step's last update; None without
  # updates. A first update's loss is 0, because advantages have mean 0.
  loss: float | None
  clipped: float | None  # share of the tokens
  drafter_loss: float | None  # of a drafter that learns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """The rollouts of an arm, compared with those without drafts.

  Speeds are of the steps from the second epoch on (of all steps, if there is
  one epoch), without the first step of each process, which compiles. A speedup
  is over steps, by the time per token; `plain` is the arm without drafts that
  has as many rows.
  """

  arm: str
  drafter: str
  num_draft_tokens: int
  num_rows: int
  has_history: bool
  timed_steps: int
  reward: float
  tokens_per_round: float
  tokens_per_s: float | None
  plain: str | None  # None if there is none, or if it is this arm
  speedup: float | None
  speedup_ci95: list[float] | None
  # By the time in which at most four answers of a step were missing.
  tail_speedup: float | None
  tail_speedup_ci95: list[float] | None
  reward_difference: float | None
  reward_difference_ci95: list[float] | None
  same_tokens: int | None  # the number of steps in which both had the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """The results of a whole run."""

  title: str
  rows: list[Steps]  # one per step
  windows: list[Steps]
  arms: list[Arm]
  held_out: list[dict[str, Any]]  # greedy answers, after `steps` steps
  are_coupled: bool  # whether all arms are to have the same tokens

  @classmethod
  def of(
    cls,
    settings: reinforcement_lib.Reinforcement,
    journal: journal_lib.Journal,
  ) -> 'Found':
    """Reads the results from the journal of a finished run."""
    records = journal.of(trainer_lib.STEP)
    numbers = list(range(1, len(records) + 1))
    parts = np.array_split(numbers, min(_NUM_WINDOWS, len(records)))
    steps = functools.partial(_steps, records, settings.first)
    return cls(
      title=(
        f'{settings.answers} answers to each of {settings.prompts} sums, at '
        f'most {settings.max_new_tokens} tokens, temperature '
        f'{settings.temperature:g}'
      ),
      rows=[steps([number]) for number in numbers],
      windows=[steps(part.tolist()) for part in parts],
      arms=[_arm(name, settings, records) for name in settings.arms],
      held_out=journal.of(trainer_lib.HELD_OUT),
      are_coupled=settings.are_coupled,
    )


def _steps(
  records: Sequence[dict[str, Any]], first: str, steps: list[int]
) -> Steps:
  chosen = [records[i - 1] for i in steps]
  arms = [record['arms'][first] for record in chosen]
  updates = [x['updates'][-1] for x in chosen if x['updates']]
  learned = [x['drafter'] for x in chosen if x['drafter']]
  return Steps(
    steps=[steps[0], steps[-1]],
    reward=_total(arms, 'reward') / len(arms),
    tokens_per_round=_total(arms, 'tokens') / _total(arms, 'rounds'),
    acceptance=_ratio(arms, 'kept', 'judged'),
    tokens_per_s=_total(arms, 'tokens') / _total(arms, 'seconds'),
    loss=_mean(updates, 'loss'),
    clipped=_mean(updates, 'clipped'),
    drafter_loss=_mean(learned, 'loss'),
  )


def _arm(
  name: str,
  settings: reinforcement_lib.Reinforcement,
  records: Sequence[dict[str, Any]],
) -> Arm:
  arm = settings.arms[name]
  drafter = arm.method.drafter
  first = (
    settings.steps_per_epoch if len(records) > settings.steps_per_epoch else 0
  )
  timed = [record for record in records[first:] if not record['begins']]
  own = [record['arms'][name] for record in records]
  plain = _plain(name, settings.arms)
  compare = lambda ratio, over, **bounds: (
    _compared(ratio, over, name, plain, **bounds) if plain else (None, None)
  )
  speedup = compare(functools.partial(_speedup, 'seconds'), timed)
  tail = compare(functools.partial(_speedup, 'tail_seconds'), timed)
  difference = compare(_difference, records, least=-1.0)
  same = [
    record['arms'][name]['digest'] == record['arms'][plain]['digest']
    for record in records
    if plain
  ]
  return Arm(
    arm=name,
    drafter=type(drafter).__name__,
    num_draft_tokens=drafter.num_draft_tokens,
    num_rows=arm.num_rows,
    has_history=arm.looks_up,
    timed_steps=len(timed),
    reward=_total(own, 'reward') / len(own),
    tokens_per_round=_total(own, 'tokens') / _total(own, 'rounds'),
    tokens_per_s=_ratio([x['arms'][name] for x in timed], 'tokens', 'seconds'),
    plain=plain,
    speedup=speedup[0],
    speedup_ci95=speedup[1],
    tail_speedup=tail[0],
    tail_speedup_ci95=tail[1],
    reward_difference=difference[0],
    reward_difference_ci95=difference[1],
    same_tokens=sum(same) if plain else None,
  )


def _plain(name: str, arms: Mapping[str, arm_lib.Arm]) -> str | None:
  """Returns the arm that another is compared with, None if there is none.

  The last one counts: `auto` may have decided for an arm without drafts too.
  """
  plain = [
    other
    for other, arm in arms.items()
    if arm.is_plain and arm.num_rows == arms[name].num_rows
  ]
  return None if plain[-1:] in ([], [name]) else plain[-1]


def _total(records, field):
  return sum(record[field] for record in records)


def _mean(records, field):
  return _total(records, field) / len(records) if records else None


def _ratio(records, part, whole):
  total = _total(records, whole)
  return _total(records, part) / total if total else None


def _compared(ratio, records, name, plain, **bounds):
  """Returns a ratio of an arm and the plain one, and its interval."""
  terms = {'steps': np.ones(len(records))}
  for whose, arm in (('', name), ('plain ', plain)):
    for field in ('tokens', 'seconds', 'tail_seconds', 'reward'):
      values = [record['arms'][arm][field] for record in records]
      terms[f'{whose}{field}'] = np.asarray(values, float)
  with np.errstate(divide='ignore', invalid='ignore'):
    value = float(ratio({key: x.sum() for key, x in terms.items()}))
  if not np.isfinite(value):
    return None, None
  return value, intervals.interval(ratio, terms, **bounds)


def _speedup(seconds, sums):
  per_token = lambda whose: sums[f'{whose}{seconds}'] / sums[f'{whose}tokens']
  return per_token('plain ') / per_token('')


def _difference(sums):
  return (sums['reward'] - sums['plain reward']) / sums['steps']


def write(out: pathlib.PurePath, found: Found) -> None:
  """Writes grpo.json and grpo.png."""
  described = environment.describe() | {
    'gin_config': gin.operative_config_str()
  }
  result_file.write(out / 'grpo.json', dataclasses.asdict(found) | described)
  figures.write_png(out / 'grpo.png', functools.partial(_figure, found))


def show(out: pathlib.PurePath, found: Found) -> None:
  """Prints a table of the steps, and one of the arms."""
  shown = tables.console()
  shown.print(rich.text.Text(f'\n{found.title}\n', 'bold'))
  shown.print(_table_of_steps(found))
  shown.print(_table_of_arms(found))
  for line in _remarks(found):
    shown.print(line)


def _table_of_steps(found: Found) -> tables.Table:
  headings = (
    *('steps', 'reward', 'tokens per round', 'acceptance', 'tokens/s'),
    *('loss', 'clipped', "drafter's loss"),
  )
  lines = [
    [
      '{} to {}'.format(*row.steps),
      f'{row.reward:.3f}',
      f'{row.tokens_per_round:.2f}',
      columns.number(row.acceptance, '.2f'),
      f'{row.tokens_per_s:.1f}',
      columns.number(row.loss, '.4f'),
      columns.number(row.clipped, '.0%'),
      columns.number(row.drafter_loss, '.3f'),
    ]
    for row in found.windows
  ]
  return tables.Table(headings, lines)


def _table_of_arms(found: Found) -> tables.Table:
  headings = (
    *('rollouts', 'rows', 'K', 'reward', 'tokens\nper round', 'tokens/s'),
    *('speedup', 'in the tail'),
  )
  lines = [
    [
      arm.arm,
      str(arm.num_rows),
      str(arm.num_draft_tokens),
      f'{arm.reward:.3f}',
      f'{arm.tokens_per_round:.2f}',
      columns.number(arm.tokens_per_s, '.1f'),
      columns.with_interval(arm.speedup, arm.speedup_ci95, '.2f'),
      columns.with_interval(arm.tail_speedup, arm.tail_speedup_ci95, '.2f'),
    ]
    for arm in found.arms
  ]
  return tables.Table(headings, lines)


def _remarks(found: Found):
  first, last = found.held_out[0], found.held_out[-1]
  yield (
    f'greedy answers to {first["answers"]} held-out sums: reward '
    f'{first["reward"]:.3f} before the first step, {last["reward"]:.3f} after '
    f'step {last["steps"]}'
  )
  for arm in found.arms:
    if arm.plain is None:
      continue
    others = len(found.rows) - (arm.same_tokens or 0)
    text = f'{arm.arm} and {arm.plain}: the same tokens in {arm.same_tokens} '
    text += f'of {len(found.rows)} steps'
    if others:
      difference = columns.with_interval(
        arm.reward_difference, arm.reward_difference_ci95, '+.3f'
      )
      text += f', a reward that differs by {difference}'
    if others and found.are_coupled:
      text += ' (coupled tokens differ where rounding decides)'
    yield text


def _figure(found: Found):
  figure = figures.new(3.4, found.title)
  rewards, rounds = figure.subplots(1, 2)
  steps = [row.steps[0] for row in found.rows]
  middle = [sum(row.steps) / 2 for row in found.windows]
  for axes, field, color in (
    (rewards, 'reward', figures.VERMILLION),
    (rounds, 'tokens_per_round', figures.BLUE),
  ):
    of = lambda rows, field=field: [getattr(row, field) for row in rows]
    axes.plot(steps, of(found.rows), '.', color=color, alpha=0.35, markersize=5)
    axes.plot(middle, of(found.windows), 'o-', color=color, label='rollouts')
  rewards.plot(
    [record['steps'] for record in found.held_out],
    [record['reward'] for record in found.held_out],
    's--',
    color=figures.GREY,
    label='held-out sums, greedily',
  )
  rewards.set_title('Reward')
  rewards.set_ylim(0, 1)
  figure.legend(
    *rewards.get_legend_handles_labels(),
    frameon=False,
    fontsize=8,
    loc='outside lower left',
    ncols=2,
  )
  rounds.set_title('Tokens per round')
  rounds.set_ylim(bottom=1)
  for axes in (rewards, rounds):
    figures.style(axes)
    axes.set_xlabel('step')
    figures.count_by_ones(axes.xaxis)
  return figure
