"""Trains a drafter on the data that its target wrote.

  python -m experiments.make_data --out=data/smollm2
  python -m experiments.train --data=data/smollm2   # Hydra
  python -m experiments.train --gin_file=configs/runs/train_draft.gin \
    --data=data/smollm2 --data=data/texts

Writes the drafter and its card to --out/drafter, for `specsample.load_drafter`,
the metrics as JSON lines (--tensorboard: for TensorBoard too) and the curves as
PNG. Checkpoints there let the same command go on after an interruption.
This file only wires: training.py has the settings, trainer.py the loop.
"""

from collections.abc import Sequence
import contextlib
import time

from absl import flags
from etils import epath
import gin
import jax

from experiments import card
from experiments import cli
from experiments import config
from experiments import curves
from experiments import data_folder
from experiments import environment
from experiments import features
from experiments import journal as journal_lib
from experiments import mesh
from experiments import scalars
from experiments import train_state
from experiments import trainer as trainer_lib
from experiments import training as training_lib
import specsample
from specsample import drafter_card
from specsample import files
from specsample.models import checkpoint
from specsample.models import fingerprint
from specsample.types import Params

config.define_flags('configs/runs/train_hydra.gin')
flags.adopt_module_key_flags(config)
_DATA = flags.DEFINE_multi_string(
  'data',
  None,
  'Folder that make_data wrote with the target; may be given several times.',
  required=True,
)
_OUT = flags.DEFINE_string(
  'out', None, 'Folder of the run; default results/<name of the gin file>.'
)
_TENSORBOARD = flags.DEFINE_bool(
  'tensorboard',
  False,
  'Writes the metrics to OUT/tensorboard too, for TensorBoard to show.',
)


def main() -> None:
  """Checks everything, then trains from where the last run was."""
  config.parse()
  environment.set_up()
  with mesh.configured():
    _train()


def _train() -> None:
  with contextlib.ExitStack() as stack, cli.bad_input():
    out = files.at(_OUT.value or f'results/{config.name()}')
    training = training_lib.Training()
    target = training.target
    data = _read_data(training)
    if _TENSORBOARD.value:
      scalars.check(out)
    cli.make_folder(out)
    journal = journal_lib.Journal(out, _header(training, data))
    split = training_lib.Split.of(training, data, None)
    # Before the long pass over the data: what says that they are too long, and
    # what is of another run.
    batches = trainer_lib.batches_of(training, split.train)
    trainer_lib.batches_of(training, split.held_out)
    num_steps = trainer_lib.num_steps(training, batches)
    checkpoints = train_state.Checkpoints(out / 'checkpoints')
    trainer_lib.check(journal, checkpoints)
    _check_written(out, journal, num_steps)
    observe: scalars.Observe = scalars.observe_nothing
    if _TENSORBOARD.value:
      observe = stack.enter_context(scalars.writer(out / 'tensorboard'))
      trainer_lib.observe_again(journal, observe)
    if training.cache_hidden:
      vectors = [_read_vectors(training, part, journal) for part in data]
      split = training_lib.Split.of(training, data, vectors)
    d2t = training_lib.draft_vocabulary(
      split.train,
      training.objective.drafter.draft_vocab_size,
      target.model.vocab_size,
    )
    own = training.objective.drafter.init_params(
      jax.random.key(training.seed), target.params, d2t
    )
    trainer = trainer_lib.Trainer(
      training=training,
      split=split,
      params={'target': target.params, 'drafter': own},
      journal=journal,
      checkpoints=checkpoints,
      observe=observe,
    )
    try:
      params = trainer.run()
    except trainer_lib.LossError as error:
      cli.fail(
        f'{error}: stopped; of the checkpoints in {out / "checkpoints"} '
        f'{trainer.checkpoints.last}. Lower Training.learning_rate, and give '
        'another --out',
        1,
      )
    _write(out, trainer, params, data)


def _read_data(training):
  """What is read of each folder, which is the same however it grows."""
  for folder in _DATA.value:
    if _DATA.value.count(folder) > 1:
      raise ValueError(f'--data names {folder} twice: give each folder once')
  first = lambda data: data.first(
    training.max_tokens, training.held_out_every, training.held_out_answers
  )
  return [
    first(data_folder.load_for(folder, training.target))
    for folder in _DATA.value
  ]


def _read_vectors(training, data, journal):
  """The target's vectors; how long it took to find them is noted."""
  begin = time.monotonic()
  vectors, num_tokens = features.read(
    data, training.target, training.objective.drafter.feature_layers
  )
  key = (trainer_lib.HIDDEN, data.digest())
  if num_tokens and key not in journal:
    seconds = round(time.monotonic() - begin, 3)
    journal.add(key, {'tokens': num_tokens, 'seconds': seconds})
  return vectors


def _check_written(out, journal, num_steps):
  if (trainer_lib.TRAIN, num_steps) not in journal:
    for name in ('target', 'drafter'):
      train_state.refuse_results(
        out / name, f'is not at its last step, {num_steps}'
      )


def _write(
  out: epath.Path,
  trainer: trainer_lib.Trainer,
  params: Params,
  data: Sequence[data_folder.Data],
) -> None:
  """The curves, the target if it was trained, and last the drafter.

  What is there whole stays: `_check_written` says why it is this run's. Whole
  is what has the file that is written last; in a bucket a kill leaves folders
  without it, and saving refuses those.
  """
  training = trainer.training
  target, drafter = training.target, training.objective.drafter
  content = card.of(trainer, data)
  curves.draw(
    out / 'curves.png',
    trainer.journal.of(trainer_lib.TRAIN),
    trainer.journal.of(trainer_lib.HELD_OUT),
    f'{type(drafter).__name__}, K = {drafter.num_draft_tokens}',
  )
  of_target = out / 'target'
  is_saved = (of_target / checkpoint.CONFIG_NAME).exists()
  if training.trains_target and not is_saved:
    checkpoint.save(
      of_target, target.model, params['target'], target.optional_tokenizer
    )
  folder = out / 'drafter'
  if not (folder / drafter_card.NAME).exists():
    specsample.save_drafter(
      folder,
      drafter,
      params['drafter'],
      target=(
        fingerprint.of(params['target'])
        if training.trains_target
        else target.fingerprint
      ),
      card=content,
    )
  print(card.text(content, folder))


def _header(training, data):
  """What a run that goes on must have in common with the one before."""
  return {
    'configuration': gin.config_str(),
    'target': training.target.fingerprint,
    'data': [part.digest() for part in data],
    **environment.identity(),
  }


if __name__ == '__main__':
  cli.run(main, 'interrupted: the same command goes on from here')
