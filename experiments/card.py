"""What a trained drafter's card says of how it came about."""

from collections.abc import Sequence
import os
from typing import Any

import gin

from experiments import data_folder
from experiments import dialogues as dialogues_lib
from experiments import environment
from experiments import trainer as trainer_lib

_HELD_OUT = "greedy decoding of the target's greedy answers"
_HELD_OUT_OF_NEW = (
  'greedy answers of the target before it was trained, as if it wrote them'
)


def of(
  trainer: trainer_lib.Trainer, data: Sequence[data_folder.Data]
) -> dict[str, Any]:
  """The card of a run that is through, as JSON; rates are of wall time.

  Args:
    trainer: after its last step.
    data: all that the run had.
  """
  training = trainer.training
  reports = trainer.journal.of(trainer_lib.TRAIN)
  evaluations = trainer.journal.of(trainer_lib.HELD_OUT)
  hidden = trainer.journal.of(trainer_lib.HIDDEN)
  seconds = sum(report['seconds'] for report in reports)
  seen = sum(report['answer_tokens'] for report in reports)
  folders = [_folder(part, training.held_out_every) for part in data]
  total = lambda name: sum(folder[name] for folder in folders)
  final = evaluations[-1]
  return {
    'target': _target_name(),
    'data': {
      'what': '; '.join(sorted({part.what for part in data})),
      'dialogues': total('dialogues'),
      'answer_tokens': total('answer_tokens'),
      'folders': folders,
    },
    'training': {
      'steps': trainer.num_steps,
      'epochs': trainer.num_steps / trainer.steps_per_epoch,
      'answer_tokens_seen': seen,
      'answer_tokens_per_second': seen / seconds,
      'hours': seconds / 3600,
      'settings': training.settings(),
      'configuration': gin.operative_config_str(),
      **environment.describe(),
    },
    # Where they were not kept when the dialogues were written.
    'hidden_vectors': [
      x | {'tokens_per_second': x['tokens'] / x['seconds']} for x in hidden
    ],
    'held_out': {
      'what': _HELD_OUT_OF_NEW if training.trains_target else _HELD_OUT,
      'answer_tokens_per_second': final['tokens'] / final['seconds'],
      'answer_tokens': final['tokens'],
      'loss': final['loss'],
      'tokens_per_round': final['tokens_per_round'],
      'acceptance_by_position': final['acceptance_by_position'],
      'by_answer_tokens_seen': _curve(reports, evaluations),
    },
  }


def text(card: dict[str, Any], folder: os.PathLike[str]) -> str:
  """A few lines of it."""
  data, training = card['data'], card['training']
  held_out = card['held_out']
  shares = ' '.join(
    '-' if x is None else f'{x:.3f}' for x in held_out['acceptance_by_position']
  )
  return (
    f'{training["answer_tokens_seen"]:,} tokens of answers seen '
    f'({data["answer_tokens"]:,} of them different) in '
    f'{training["hours"]:.2f} h, {training["answer_tokens_per_second"]:,.0f} a '
    'second\n'
    f'held out, greedy: {held_out["tokens_per_round"]:.3f} tokens a round, '
    f'acceptance by position {shares}\n'
    f'{folder}'
  )


def _folder(data, held_out_every):
  """What was read of a folder, and how that was made."""
  train, held_out = data.numbers(held_out_every)
  tokens = lambda numbers: sum(
    dialogues_lib.answer_tokens(data.shards[i]) for i in numbers
  )
  making = data.manifest
  return {
    'what': data.what,
    'digest': data.digest(),
    'dialogues': sum(len(data.shards[i]) for i in train),
    'answer_tokens': tokens(train),
    'held_out_answer_tokens': tokens(held_out),
    'answer_tokens_per_second': making['answer_tokens_per_second'],
    'hardware': making['hardware'],
    'command': making['command'],
    'settings': {
      name: value
      for name, value in data.identity.settings.items()
      if name not in ('openings', 'template')
    },
  }


def _target_name():
  """As the configuration has it, None where it does not say."""
  try:
    return gin.query_parameter('target/specsample.load.name_or_path')
  except ValueError:
    return None


def _curve(reports, evaluations):
  """Pairs of tokens seen and tokens a round."""
  seen = trainer_lib.seen(reports)
  return [[seen[x['step']], x['tokens_per_round']] for x in evaluations]
