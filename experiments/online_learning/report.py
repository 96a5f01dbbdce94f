"""Acceptance by tokens served, with and without updates, from a journal."""

import dataclasses
import functools
import pathlib
from typing import Any

import gin
import numpy as np
import rich.text

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.online_learning import server as serving_lib
from experiments.reporting import figures
from experiments.reporting import intervals
from experiments.reporting import result_file
from experiments.reporting import tables

_NAMES = {
  serving_lib.CONTROL: 'without updates',
  serving_lib.LEARNING: 'learning',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """Consecutive batches, served by both arms."""

  first_token: int  # number of tokens served before it
  tokens: int
  prompts: int
  acceptance: dict[str, float]  # of each arm: kept drafts over proposed ones
  tokens_per_round: dict[str, float]
  rise: float  # of the acceptance, with updates
  rise_ci95: list[float] | None  # over prompts, with the arms paired


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """The results of a whole run."""

  title: str
  windows: list[Window]
  batches: dict[str, list[dict[str, Any]]]  # the journal's records of each arm
  outputs_equal: bool  # whether both arms emitted the same tokens

  @classmethod
  def of(
    cls,
    serving: serving_lib.Serving,
    prompts: str,
    journal: journal_lib.Journal,
  ) -> 'Found':
    """Reads the results from the journal of a finished run."""
    batches = {arm: journal.of(arm) for arm in serving_lib.ARMS}
    parts = np.array_split(
      np.arange(len(batches[serving_lib.CONTROL])), serving.windows
    )
    served = np.cumsum(
      [0] + [sum(x['tokens']) for x in batches[serving_lib.LEARNING]]
    )
    digests = [[x['digest'] for x in batches[arm]] for arm in batches]
    return cls(
      title=(
        f'{prompts} ({serving.split} half), '
        f'temperature {serving.sampling.temperature}, '
        f'K = {serving.drafter.num_draft_tokens}, an update every '
        f'{serving.rounds} rounds of {serving.batch_size} rows'
      ),
      windows=[
        _window(
          {arm: [batches[arm][i] for i in part] for arm in batches},
          int(served[part[0]]),
        )
        for part in parts
      ],
      batches=batches,
      outputs_equal=digests[0] == digests[1],
    )


def _window(batches, first_token) -> Window:
  rows = {arm: _rows(records) for arm, records in batches.items()}
  control, learning = (rows[arm] for arm in serving_lib.ARMS)
  share = lambda x: _acceptance(x['accepted'].sum(), x['proposed'].sum())
  acceptance = {arm: float(share(x)) for arm, x in rows.items()}
  return Window(
    first_token=first_token,
    tokens=int(learning['tokens'].sum()),
    prompts=control['tokens'].size,
    acceptance=acceptance,
    tokens_per_round={
      arm: float(x['tokens'].sum() / x['rounds'].sum())
      for arm, x in rows.items()
    },
    rise=acceptance[serving_lib.LEARNING] - acceptance[serving_lib.CONTROL],
    rise_ci95=intervals.interval(
      _rise,
      {
        f'{arm} {name}': rows[arm][name]
        for arm in serving_lib.ARMS
        for name in ('accepted', 'proposed')
      },
      least=-1.0,
      most=1.0,
    ),
  )


def _acceptance(accepted, proposed):
  return accepted / np.maximum(proposed, 1)


def _rise(sums):
  """Returns the acceptance with updates minus that without."""
  control, learning = (
    _acceptance(sums[f'{arm} accepted'], sums[f'{arm} proposed'])
    for arm in serving_lib.ARMS
  )
  return learning - control


def _rows(records) -> dict[str, np.ndarray]:
  """Returns the counts of every prompt of some batches, [n] each."""
  names = ('tokens', 'rounds', 'proposed', 'accepted')
  return {
    name: np.concatenate([record[name] for record in records]) for name in names
  }


def write(out: pathlib.PurePath, found: Found) -> None:
  """Writes online.json and online.png."""
  described = environment.describe() | {
    'gin_config': gin.operative_config_str()
  }
  result_file.write(out / 'online.json', dataclasses.asdict(found) | described)
  draw(out / 'online.png', found)


def show(out: pathlib.PurePath, found: Found) -> None:
  """Prints a line per window, and the cost of the updates."""
  shown = tables.console()
  shown.print(rich.text.Text(f'\n{found.title}\n', 'bold'))
  headings = (
    *('tokens served', 'prompts', *_NAMES.values(), 'rise'),
    'its 95% interval',
  )
  lines = []
  for window in found.windows:
    last = window.first_token + window.tokens
    interval = '-'
    if window.rise_ci95 is not None:
      interval = '{:+.3f} to {:+.3f}'.format(*window.rise_ci95)
    lines.append(
      [
        f'{window.first_token:,} to {last:,}',
        f'{window.prompts}',
        *(f'{window.acceptance[arm]:.3f}' for arm in _NAMES),
        f'{window.rise:+.3f}',
        interval,
      ]
    )
  shown.print(tables.Table(headings, lines))
  learning = found.batches[serving_lib.LEARNING]
  updates = sum(len(record['updates']) for record in learning)
  undone = sum(record['undone'] for record in learning)
  shown.print(
    'acceptance: the share of draft tokens that were kept. '
    f'{updates} updates, {undone} gave NaN or infinity and were undone'
  )
  # The first batches of a process are left out: they spent most of their time
  # compiling.
  timed = [
    [record['seconds'] for record in pair]
    for pair in zip(*found.batches.values(), strict=True)
    if not any(record['compiled'] for record in pair)
  ]
  if timed:
    without, learning_seconds = map(sum, zip(*timed, strict=True))
    shown.print(
      f'{len(timed)} batches that compiled nothing: {without:.0f} s without '
      f'updates, {learning_seconds:.0f} s with updates'
    )
  same = 'the same tokens' if found.outputs_equal else 'different tokens'
  shown.print(f'with updates and without: {same}')
  names = figures.written('online.json', 'drafter', 'online.png')
  print(f'\n{names} are in {out}')


def draw(path: pathlib.PurePath, found: Found) -> None:
  """Draws acceptance and tokens per round by tokens served, as a PNG."""
  figures.write_png(path, functools.partial(_figure, found))


def _figure(found):
  figure = figures.new(3.4, found.title)
  acceptance, rounds = figure.subplots(1, 2)
  middle = [w.first_token + w.tokens / 2 for w in found.windows]
  for arm, color in zip(serving_lib.ARMS, figures.COLORS, strict=False):
    records = found.batches[arm]
    tokens = np.asarray([sum(record['tokens']) for record in records])
    each = [
      sum(record['accepted']) / max(sum(record['proposed']), 1)
      for record in records
    ]
    acceptance.plot(
      np.cumsum(tokens) - tokens / 2,
      each,
      '.',
      color=color,
      alpha=0.35,
      markersize=5,
    )
    line = {'marker': 'o', 'color': color, 'label': _NAMES[arm]}
    acceptance.plot(middle, [w.acceptance[arm] for w in found.windows], **line)
    rounds.plot(
      middle, [w.tokens_per_round[arm] for w in found.windows], **line
    )
  acceptance.set_title('Acceptance rate')
  acceptance.set_ylim(bottom=0)
  rounds.set_title('Tokens per round')
  rounds.set_ylim(bottom=1)
  for axes in (acceptance, rounds):
    figures.style(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel('tokens served')
    figures.count_by_thousands(axes.xaxis)
    axes.legend(frameon=False, loc='lower right')
  return figure
