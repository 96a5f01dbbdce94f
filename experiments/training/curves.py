"""The curves of a training run, as a PNG."""

import functools
import pathlib

from experiments.reporting import figures
from experiments.training import history as history_lib

_TRAIN, _HELD_OUT = figures.GREY, figures.BLUE


def draw(
  path: pathlib.PurePath, history: history_lib.History, title: str
) -> None:
  """Draws the losses, the tokens per round and the acceptance by position."""
  figures.write_png(path, functools.partial(_figure, history, title))


def _figure(history, title):
  figure = figures.new(7.5, title)
  losses, rounds, acceptance = figure.subplots(3, 1)
  train, held_out = history.train, history.held_out
  seen = history.seen()
  at = [seen[record['step']] for record in held_out]
  losses.plot(
    list(seen.values()),
    [record['loss'] for record in train],
    color=_TRAIN,
    linewidth=1,
    label='training',
  )
  losses.plot(
    at,
    [record['loss'] for record in held_out],
    'o-',
    color=_HELD_OUT,
    label='held out',
  )
  losses.set_title('Loss')
  losses.legend(frameon=False)
  for name, label, color in (
    ('tokens_per_round', 'decoded', _HELD_OUT),
    ('replayed_tokens_per_round', 'replayed answers', _TRAIN),
  ):
    means = [record[name] for record in held_out]
    rounds.plot(at, means, 'o-', color=color, label=label)
  rounds.legend(frameon=False)
  rounds.set_title('Tokens per round, held-out prompts')
  shares = [record['acceptance_by_position'] for record in held_out]
  of_positions = list(zip(*shares, strict=True))
  looks = figures.looks([str(i + 1) for i in range(len(of_positions))])
  for (name, look), values in zip(looks.items(), of_positions, strict=True):
    acceptance.plot(
      at, values, color=look.color, marker=look.marker, label=name
    )
  acceptance.set_title('Acceptance by position, held out')
  acceptance.set_ylim(0, 1)
  figure.legend(
    *acceptance.get_legend_handles_labels(),
    frameon=False,
    title='position',
    loc='outside lower left',
    ncols=8,
  )
  for axes in (losses, rounds, acceptance):
    figures.style(axes)
    axes.set_xlabel('tokens of answers seen')
    figures.count_by_thousands(axes.xaxis)
  return figure
