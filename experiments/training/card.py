"""The card of a trained drafter: how it was trained, and how good it is."""

import os
from typing import Any

import gin

from experiments.command import environment
from experiments.training import data as data_lib
from experiments.training import records as records_lib
from experiments.training import trainer as trainer_lib
from experiments.training_data import dialogues as dialogues_lib

_HELD_OUT = 'greedy decoding of held-out prompts, by the decoding loop'
_REPLAYED = "the target's greedy answers, replayed"
_REPLAYED_OF_OLD = (
  'greedy answers of the target before it was trained, replayed as if they '
  'were its own'
)


def make(
  trainer: trainer_lib.Trainer, data: data_lib.TrainingData
) -> dict[str, Any]:
  """Returns the card of a finished run, as JSON; rates use wall time.

  Args:
    trainer: the trainer after its last step.
    data: all data that the run has read.
  """
  training, records, plan = trainer.training, trainer.records, trainer.plan()
  reports = records.curve(plan, records_lib.TRAIN)
  evaluations = records.curve(plan, records_lib.HELD_OUT)
  seconds = sum(report['seconds'] for report in reports)
  seen = records_lib.seen(reports)
  best = trainer.checkpoints.best(plan)
  assert best is not None
  folders = [_folder(data, i) for i in range(len(data.folders))]
  total = lambda name: sum(folder[name] for folder in folders)
  return {
    'target': _target_name(),
    'data': {
      'what': '; '.join(sorted({part.what for part in data.folders})),
      'dialogues': total('dialogues'),
      'answer_tokens': total('answer_tokens'),
      'folders': folders,
    },
    'training': {
      # The best step; the weights are those after it.
      'steps': best['step'],
      'decay_start': plan.decay_start,
      'last_step': plan.num_steps,
      'answer_tokens_seen': seen[best['step']],
      'answer_tokens_per_second': seen[plan.num_steps] / seconds,
      'hours': (seconds + sum(x['seconds'] for x in evaluations)) / 3600,
      'settings': training.settings(),
      'configuration': gin.operative_config_str(),
      **environment.describe(),
      'segments': records.segments,
    },
    # One entry for each time that a folder's vectors had to be computed.
    'hidden_vectors': [
      x | {'tokens_per_second': x['tokens'] / x['seconds']}
      for x in records.hidden
    ],
    'held_out': {
      'what': _HELD_OUT,
      'answer_tokens': best['tokens'],
      'tokens_per_round': best['tokens_per_round'],
      'acceptance_by_position': best['acceptance_by_position'],
      'loss': best['loss'],
      'by_answer_tokens_seen': _curve(seen, evaluations, 'tokens_per_round'),
      'replayed': {
        'what': _REPLAYED_OF_OLD if training.trains_target else _REPLAYED,
        'answer_tokens': best['replayed_tokens'],
        'answer_tokens_per_second': (
          best['replayed_tokens'] / best['replayed_seconds']
        ),
        'tokens_per_round': best['replayed_tokens_per_round'],
        'acceptance_by_position': best['replayed_acceptance_by_position'],
        'by_answer_tokens_seen': _curve(
          seen, evaluations, 'replayed_tokens_per_round'
        ),
      },
    },
  }


def text(card: dict[str, Any], folder: os.PathLike[str]) -> str:
  """Returns a summary of the card in a few lines."""
  data, training = card['data'], card['training']
  held_out, replayed = card['held_out'], card['held_out']['replayed']
  shares = ' '.join(
    '-' if x is None else f'{x:.3f}' for x in held_out['acceptance_by_position']
  )
  return (
    f'best of {training["last_step"]:,} steps is step {training["steps"]:,}: '
    f'{training["answer_tokens_seen"]:,} tokens of answers seen '
    f'({data["answer_tokens"]:,} of them different); the run took '
    f'{training["hours"]:.2f} h at {training["answer_tokens_per_second"]:,.0f} '
    'tokens per second\n'
    f'held-out prompts, greedy: {held_out["tokens_per_round"]:.3f} tokens per '
    f'round (replayed answers: {replayed["tokens_per_round"]:.3f}), '
    f'acceptance by position {shares}\n'
    f'{folder}'
  )


def _folder(data: data_lib.TrainingData, i: int) -> dict[str, Any]:
  """Returns what was read from a folder, and how the folder was made."""
  folder = data.folders[i]
  train = data.train[i]
  tokens = lambda numbers: sum(
    dialogues_lib.answer_tokens(folder.shards[n]) for n in numbers
  )
  making = folder.manifest
  return {
    'what': folder.what,
    'digest': folder.digest(),
    'shards': len(train),
    'dialogues': sum(len(folder.shards[n]) for n in train),
    'answer_tokens': tokens(train),
    'held_out_answer_tokens': tokens(data.held_out[i]),
    'answer_tokens_per_second': making['answer_tokens_per_second'],
    'hardware': making['hardware'],
    'command': making['command'],
    'settings': {
      name: value
      for name, value in folder.identity.settings.items()
      if name not in ('openings', 'template')
    },
  }


def _target_name():
  """Returns the target's name in the configuration, None if it has none."""
  try:
    return gin.query_parameter('target/specsample.load.name_or_path')
  except ValueError:
    return None


def _curve(seen, evaluations, name):
  """Returns pairs of the tokens seen and the value measured then."""
  return [[seen[x['step']], x[name]] for x in evaluations]
