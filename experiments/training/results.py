"""The results of a training run: curves, card, drafter and target.

A drafter's card says how it was trained, and how good it is.
"""

from collections.abc import Mapping, Sequence
import functools
import os
from typing import Any

from etils import epath
import gin

from experiments.command import distributed
from experiments.command import environment
from experiments.reporting import figures
from experiments.training import held_out
from experiments.training import history as history_lib
from experiments.training import trainer as trainer_lib
from experiments.training_data import data_folder
import specsample
from specsample import files
from specsample.loading import card as card_lib
from specsample.models import checkpoint
from specsample.models import fingerprint
from specsample.types import Params

_HELD_OUT_WHAT = 'greedy decoding of held-out prompts, by the decoding loop'
_REPLAYED = "the target's greedy answers, replayed"
_REPLAYED_OF_OLD = (
  'greedy answers of the target before it was trained, replayed as if they '
  'were its own'
)


def write(
  out: epath.Path,
  trainer: trainer_lib.Trainer,
  params: Params,
  data: Sequence[data_folder.Data],
) -> None:
  """Writes the curves, the target if it was trained, and last the drafter.

  Results of the same step are kept. Results of an earlier end of the same run
  are replaced, and so are results that a kill left half-written.

  `params` is the whole tree of the best step; the trainer took its last one.
  """
  training = trainer.training
  content = _card(trainer, data)
  drafter = training.drafter
  if distributed.is_first():
    title = f'{type(drafter).__name__}, K = {drafter.num_draft_tokens}'
    draw = functools.partial(_curves, trainer.history, title)
    figures.write_png(out / 'curves.png', draw)
  folder, of_target = out / 'drafter', out / 'target'
  if not _is_written(folder, content):
    prompts = held_out.choose_prompts(training, trainer.split.prompts)
    setup = held_out.setup(training, params)
    content['held_out'] |= held_out.trees_for_card(setup, prompts)
    _remove(folder)
    target = training.target.fingerprint
    if training.trains_target:
      _remove(of_target)
      checkpoint.save(
        of_target,
        training.target.model,
        params['target'],
        training.target.optional_tokenizer,
      )
      target = fingerprint.compute(params['target'])
    specsample.save_drafter(
      folder, drafter, params['drafter'], target=target, card=content
    )
  print(_text(content, folder))


def check(out: epath.Path, history: history_lib.History, step: int) -> None:
  """Refuses results of another run, which would pass for those of this run.

  A run that has not taken its last step has none, unless it was made longer.
  `step` is the one that the run continues from.
  """
  is_own = step == history.plan.num_steps
  path = out / 'drafter' / card_lib.NAME
  if path.exists():
    training = files.read_json(path).get('training', {})
    is_own = training.get('run') == history.run
  for folder in (out / 'target', out / 'drafter'):
    if files.is_folder(folder) and not is_own:
      raise ValueError(
        f'{folder} exists, but this run is not at its last step, '
        f'{history.plan.num_steps}, so the folder belongs to another run: '
        'delete it or move it away, or give another --out'
      )


def _is_written(folder: epath.Path, content: Mapping[str, Any]) -> bool:
  """Returns whether a complete drafter of the same step and plan is there."""
  path, found = folder / card_lib.NAME, {}
  if distributed.is_first() and path.exists():
    found = files.read_json(path).get('training', {})
  names = ('steps', 'decay_start', 'last_step')
  is_same = all(found.get(x) == content['training'][x] for x in names)
  return distributed.from_first(is_same)


def _remove(folder: epath.Path) -> None:
  if distributed.is_first() and files.is_folder(folder):
    folder.rmtree()


def _card(
  trainer: trainer_lib.Trainer, data: Sequence[data_folder.Data]
) -> dict[str, Any]:
  """Returns the card of a finished run, as JSON; rates use wall time."""
  training, history = trainer.training, trainer.history
  seconds = sum(report['seconds'] for report in history.train)
  seen, best = history.seen(), history.best
  assert best is not None
  folders = [_folder(part, training.held_out_every) for part in data]
  total = lambda name: sum(folder[name] for folder in folders)
  curve = lambda name: [[seen[x['step']], x[name]] for x in history.held_out]
  return {
    'target': _target_name(),
    'data': {
      'what': '; '.join(sorted({part.what for part in data})),
      'dialogues': total('dialogues'),
      'answer_tokens': total('answer_tokens'),
      'folders': folders,
    },
    'training': {
      'run': history.run,
      # The best step; the weights are those after it.
      'steps': best['step'],
      'decay_start': history.plan.decay_start,
      'last_step': history.plan.num_steps,
      'answer_tokens_seen': seen[best['step']],
      'answer_tokens_per_second': seen[history.plan.num_steps] / seconds,
      'hours': (seconds + sum(x['seconds'] for x in history.held_out)) / 3600,
      'settings': training.settings(),
      'configuration': gin.operative_config_str(),
      **environment.describe(),
      'segments': history.segments,
    },
    'held_out': {
      'what': _HELD_OUT_WHAT,
      'answer_tokens': best['tokens'],
      'tokens_per_round': best['tokens_per_round'],
      'acceptance_by_position': best['acceptance_by_position'],
      'loss': best['loss'],
      'by_answer_tokens_seen': curve('tokens_per_round'),
      'replayed': {
        'what': _REPLAYED_OF_OLD if training.trains_target else _REPLAYED,
        'answer_tokens': best['replayed_tokens'],
        'answer_tokens_per_second': (
          best['replayed_tokens'] / best['replayed_seconds']
        ),
        'tokens_per_round': best['replayed_tokens_per_round'],
        'acceptance_by_position': best['replayed_acceptance_by_position'],
        'by_answer_tokens_seen': curve('replayed_tokens_per_round'),
      },
    },
  }


def _text(card: dict[str, Any], folder: os.PathLike[str]) -> str:
  """Returns a summary of the card in a few lines."""
  data, training = card['data'], card['training']
  found, replayed = card['held_out'], card['held_out']['replayed']
  shares = ' '.join(
    '-' if x is None else f'{x:.3f}' for x in found['acceptance_by_position']
  )
  return (
    f'best of {training["last_step"]:,} steps is step {training["steps"]:,}: '
    f'{training["answer_tokens_seen"]:,} tokens of answers seen '
    f'({data["answer_tokens"]:,} of them different); the run took '
    f'{training["hours"]:.2f} h at {training["answer_tokens_per_second"]:,.0f} '
    'tokens per second\n'
    f'held-out prompts, greedy: {found["tokens_per_round"]:.3f} tokens per '
    f'round (replayed answers: {replayed["tokens_per_round"]:.3f}), '
    f'acceptance by position {shares}\n'
    f'{folder}'
  )


def _folder(folder: data_folder.Data, held_out_every: int) -> dict[str, Any]:
  """Returns what was read from a folder, and how the folder was made."""
  train, held_out = folder.numbers(held_out_every)
  tokens = lambda numbers: sum(
    data_folder.num_answer_tokens(folder.shards[n]) for n in numbers
  )
  making = folder.manifest
  return {
    'what': folder.what,
    'digest': folder.digest(),
    'shards': len(train),
    'dialogues': sum(len(folder.shards[n]) for n in train),
    'answer_tokens': tokens(train),
    'held_out_answer_tokens': tokens(held_out),
    'answer_tokens_per_second': making['answer_tokens_per_second'],
    'hardware': making['hardware'],
    'command': making['command'],
    'settings': {
      name: value
      for name, value in making['settings'].items()
      if name not in ('openings', 'template')
    },
  }


def _target_name() -> str | None:
  """Returns the target's name in the configuration, None if it has none."""
  try:
    return gin.query_parameter('target/specsample.load.name_or_path')
  except ValueError:
    return None


def _curves(history: history_lib.History, title: str) -> figures.Figure:
  """Draws the losses, the tokens per round and the acceptance by position."""
  figure = figures.new(7.5, title)
  losses, rounds, acceptance = figure.subplots(3, 1)
  seen = history.seen()
  at = [seen[x['step']] for x in history.held_out]
  found = lambda name: [x[name] for x in history.held_out]
  grey, blue = figures.GREY, figures.BLUE
  train = [x['loss'] for x in history.train]
  losses.plot(list(seen.values()), train, color=grey, label='training')
  losses.plot(at, found('loss'), 'o-', color=blue, label='held out')
  losses.set_title('Loss')
  decoded, replayed = map(
    found, ('tokens_per_round', 'replayed_tokens_per_round')
  )
  rounds.plot(at, decoded, 'o-', color=blue, label='decoded')
  rounds.plot(at, replayed, 'o-', color=grey, label='replayed answers')
  rounds.set_title('Tokens per round, held-out prompts')
  of_positions = list(zip(*found('acceptance_by_position'), strict=True))
  looks = figures.looks([str(i + 1) for i in range(len(of_positions))])
  for (name, look), values in zip(looks.items(), of_positions, strict=True):
    acceptance.plot(at, values, **look.line, label=name)
  acceptance.set_title('Acceptance by position, held out')
  acceptance.set_ylim(0, 1)
  for axes in (losses, rounds):
    axes.legend(frameon=False)
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
