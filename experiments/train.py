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
import json

from absl import flags

from experiments.command import cli
from experiments.command import distributed
from experiments.command import frame
from experiments.command import journal as journal_lib
from experiments.training import begin
from experiments.training import held_out
from experiments.training import history as history_lib
from experiments.training import results
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
    data = begin.load(_DATA.value, training.target)
    if _TENSORBOARD.value:
      history_lib.check_tensorboard(out)
    digests = [folder.digest() for folder in data]
    distributed.check_same({'data': repr(digests)})
    split = begin.split(training, data, None)
    _check(training, split)
    header = training.header(digests)
    cli.make_folder(out)
    journal_lib.Journal(out, header)  # refuses another configuration, or data
    checkpoints = train_state.Checkpoints(out / 'checkpoints')
    stack.callback(checkpoints.close)
    first, history = history_lib.resume(
      checkpoints,
      journal_lib.digest(json.dumps(header, sort_keys=True)),
      steps=training.num_steps(training.batches(split.train)),
      unit=training.report_every,
      decay=training.decay,
    )
    results.check(out, history, first)
    training = _prepared(training, data)
    if training.cache_hidden:
      layers = training.drafter.feature_layers
      vectors = [features.read(x, training.target, layers)[0] for x in data]
      split = begin.split(training, data, vectors)
    own = begin.params(
      training,
      begin.draft_vocabulary(
        split,
        training.drafter.draft_vocab_size,
        training.target.model.vocab_size,
      ),
    )
    trainer = trainer_lib.Trainer(
      training=training,
      split=split,
      params={'target': training.target.params, 'drafter': own},
      checkpoints=checkpoints,
      history=history,
      observe=_observer(out, history, stack),
    )
    try:
      params = trainer.run(first)
    except trainer_lib.LossError as error:
      cli.fail(
        f'{error}: stopped; of the checkpoints in {out / "checkpoints"}, '
        f'{checkpoints.last}. Lower Training.learning_rate, and give another '
        '--out',
        1,
      )
    results.write(out, trainer, params, data)


def _observer(out, history, stack):
  """Returns what writes each measurement, for people and for TensorBoard."""
  events = None
  if _TENSORBOARD.value and distributed.is_first():
    events = stack.enter_context(history_lib.tensorboard(out / 'tensorboard'))
    for values in history.train:
      events(history_lib.TRAIN, values)
    for values in history.held_out:
      events(history_lib.HELD_OUT, values)

  def observe(kind, values):
    history.write(out / 'metrics.jsonl')
    if events is not None:
      events(kind, values)

  return observe


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
  held_out.choose_prompts(training, split.prompts)
  begin.check(training)


def _prepared(training, data):
  """Returns the settings as they are trained with.

  The target's matrices are stored as [in, out]: a step may change them, and XLA
  multiplies the many rows of a batch as fast. Without room on the disk, no
  vectors are kept.
  """
  target = training.target
  target = dataclasses.replace(target, params=packed.plain(target.params))
  training = dataclasses.replace(training, target=target)
  if not training.cache_hidden:
    return training
  fits, message = features.fit(data, target, training.drafter.feature_layers)
  if fits:
    return training
  cli.say(message)
  return dataclasses.replace(training, cache_hidden=False)


if __name__ == '__main__':
  frame.run(main, resumes=True)
