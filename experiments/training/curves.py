"""The curves of a training run, as a PNG."""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any

from experiments.reporting import figures
from experiments.training import records

_TRAIN, _HELD_OUT = '#767676', '#0072B2'
# By position; they repeat after the sixth.
_SHADES = ('#009E73', '#0072B2', '#D55E00', '#CC79A7', '#E69F00', '#56B4E9')


def draw(
  path: pathlib.PurePath,
  train: Sequence[Mapping[str, Any]],
  held_out: Sequence[Mapping[str, Any]],
  title: str,
) -> None:
  """Draws the losses, the tokens per round and the acceptance by position.

  Args:
    path: the path of the image.
    train, held_out: the journal's records of each kind, in order, with those of
      the decay last.
    title: the title above the three plots.
  """
  figures.write_png(path, functools.partial(_figure, train, held_out, title))


def _figure(train, held_out, title):
  figure = figures.new(11, 3.8)
  losses, rounds, acceptance = figure.subplots(1, 3)
  seen = records.seen(train)
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
  for i, values in enumerate(zip(*shares, strict=True)):
    acceptance.plot(
      at, values, 'o-', color=_SHADES[i % len(_SHADES)], label=f'{i + 1}'
    )
  acceptance.set_title('Acceptance by position, held out')
  acceptance.set_ylim(0, 1)
  acceptance.legend(frameon=False, title='position')
  for axes in (losses, rounds, acceptance):
    figures.style(axes)
    axes.set_xlabel('tokens of answers seen')
    figures.count_by_thousands(axes.xaxis)
  figure.suptitle(title, fontsize=10)
  return figure
