r"""Trains a drafter on the data that its target wrote.

  python -m experiments.make_data --out=data/smollm2
  python -m experiments.train --data=data/smollm2   # Hydra
  python -m experiments.train --recipe=draft \
    --data=data/smollm2 --data=data/texts

Writes the drafter and its card to --out/drafter, for `specsample.load_drafter`,
the metrics as JSON lines (with --tensorboard, for TensorBoard too) and the
curves as PNG. The same command resumes after an interruption, even on other
machines and under other code, and continues if a longer run is asked for. To
learn from more data, begin another run with Training.begin_with.
"""

# Only the wiring is here: experiments/training/training.py has the settings,
# trainer.py the loop.

import contextlib
import dataclasses
import time

from absl import flags

from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import journal as journal_lib
from experiments.training import agreement
from experiments.training import begin
from experiments.training import checkpoints as checkpoints_lib
from experiments.training import data as data_lib
from experiments.training import decoding_check
from experiments.training import records as records_lib
from experiments.training import results
from experiments.training import tensorboard
from experiments.training import train_state
from experiments.training import trainer as trainer_lib
from experiments.training import training as training_lib
from experiments.training_data import features
from specsample.models import packed

frame.define_flags('configs/runs/train.gin', on_hosts=True, recipe='hydra')
_DATA = flags.DEFINE_multi_string(
  'data',
  None,
  'Folder that make_data wrote with the target; may be given several times.',
  required=True,
)
_OUT = frame.out('the run')
_TENSORBOARD = flags.DEFINE_bool(
  'tensorboard',
  False,
  'Also writes the metrics to OUT/tensorboard, for TensorBoard.',
)


def main() -> None:
  """Checks everything, then trains from where the last run stopped."""
  with contextlib.ExitStack() as stack, cli.bad_input():
    out = frame.folder(_OUT)
    training = training_lib.Training()
    folders = data_lib.load(_DATA.value, training.target)
    if _TENSORBOARD.value:
      tensorboard.check(out)
    distributed.check_same({'data': repr([x.digest() for x in folders])})
    data = data_lib.TrainingData.of(training, folders)
    split = data_lib.Split.of(training, data, None)
    _check(training, split)
    header = agreement.header(training, data.digests())
    cli.make_folder(out)
    records = records_lib.Records(journal_lib.Journal(out, header))
    plan = trainer_lib.plan(training, training.batches(split.train), records)
    checkpoints = checkpoints_lib.RunCheckpoints(out, records)
    stack.callback(checkpoints.close)
    checkpoints.step(plan)
    if not records.has_results:
      for name in ('target', 'drafter'):
        train_state.refuse_results(
          out / name, f'is not at its last step, {plan.num_steps}'
        )
    observe: tensorboard.Observe = tensorboard.observe_nothing
    if _TENSORBOARD.value and distributed.is_first():
      observe = stack.enter_context(tensorboard.writer(out / 'tensorboard'))
      for kind in (records_lib.TRAIN, records_lib.HELD_OUT):
        for values in records.curve(plan, kind):
          observe((kind, values['step']), values)
    training = _with_room(_with_plain_matrices(training), data)
    vectors = None
    if training.cache_hidden:
      vectors = [_read_vectors(training, x, records) for x in data.folders]
    split = data_lib.Split.of(training, data, vectors)
    d2t = data_lib.draft_vocabulary(
      split,
      training.objective.drafter.draft_vocab_size,
      training.target.model.vocab_size,
    )
    own = begin.params(training, d2t)
    trainer = trainer_lib.Trainer(
      training=training,
      split=split,
      params={'target': training.target.params, 'drafter': own},
      records=records,
      checkpoints=checkpoints,
      observe=observe,
    )
    try:
      params = trainer.run()
    except trainer_lib.LossError as error:
      cli.fail(
        f'{error}: stopped; of the checkpoints in {out / "checkpoints"}, '
        f'{checkpoints.last(trainer.plan())}. Lower Training.learning_rate, '
        'and give another --out',
        1,
      )
    results.write(out, trainer, params, data)


def _check(training, split):
  """Refuses data and settings that do not fit, before anything is written."""
  if distributed.is_on() and training.on_policy_share:
    raise ValueError(
      f'Training.on_policy_share is {training.on_policy_share}, but a draft '
      'model writes in a single process only: leave out --distributed, or set '
      'it to 0'
    )
  for examples in (split.train, split.held_out):
    training.batches(examples)
  decoding_check.choose_prompts(training, split.prompts)
  begin.check(training)


def _with_plain_matrices(training):
  """Returns the settings with the target's matrices stored as [in, out].

  A step may change them, and XLA multiplies the many rows of a batch as fast.
  """
  target = training.target
  target = dataclasses.replace(target, params=packed.plain(target.params))
  return dataclasses.replace(training, target=target)


def _with_room(training, data):
  """Returns the settings, without kept vectors if the disk has no room."""
  if not training.cache_hidden:
    return training
  fits, message = features.fit(
    data.folders,
    training.target,
    training.objective.drafter.feature_layers,
  )
  if fits:
    return training
  cli.say(message)
  return dataclasses.replace(training, cache_hidden=False)


def _read_vectors(training, data, records):
  """Returns the target's vectors, and records how long computing them took."""
  begin = time.monotonic()
  vectors, num_tokens = features.read(
    data, training.target, training.objective.drafter.feature_layers
  )
  if num_tokens:
    records.add_hidden(data.digest(), num_tokens, time.monotonic() - begin)
  return vectors


if __name__ == '__main__':
  frame.run(main, resumes=True)
