"""The results of a training run: curves, card, drafter and target."""

from collections.abc import Mapping
from typing import Any

from etils import epath
import numpy as np

from experiments.command import distributed
from experiments.training import card
from experiments.training import curves
from experiments.training import data as data_lib
from experiments.training import decoding_check
from experiments.training import records
from experiments.training import trainer as trainer_lib
from experiments.training import tree_check
import specsample
from specsample import files
from specsample.loading import card as card_lib
from specsample.models import checkpoint
from specsample.models import fingerprint
from specsample.types import Params


def write(
  out: epath.Path,
  trainer: trainer_lib.Trainer,
  params: Params,
  data: data_lib.TrainingData,
) -> None:
  """Writes the curves, the target if it was trained, and last the drafter.

  Results of the same step are kept. Results of an earlier end of the same run
  are replaced, and so are results that a kill left half-written.

  Args:
    out: the folder of the run.
    trainer: the trainer after its last step.
    params: the whole tree of the best step.
    data: the data that the run has read.
  """
  training, plan = trainer.training, trainer.plan()
  content = card.make(trainer, data)
  drafter = training.drafter
  if distributed.is_first():
    curves.draw(
      out / 'curves.png',
      trainer.records.curve(plan, records.TRAIN),
      trainer.records.curve(plan, records.HELD_OUT),
      f'{type(drafter).__name__}, K = {drafter.num_draft_tokens}',
    )
  folder, of_target = out / 'drafter', out / 'target'
  if not _is_written(folder, content):
    setup = decoding_check.setup(training, params)
    content['held_out'] |= tree_check.for_card(setup, trainer.prompts)
    trainer.records.add_result(plan, content['training']['steps'])
    _remove(folder)
    if training.trains_target:
      _remove(of_target)
      checkpoint.save(
        of_target,
        training.target.model,
        params['target'],
        training.target.optional_tokenizer,
      )
    specsample.save_drafter(
      folder,
      drafter,
      params['drafter'],
      target=(
        fingerprint.compute(params['target'])
        if training.trains_target
        else training.target.fingerprint
      ),
      card=content,
    )
  print(card.text(content, folder))


def _is_written(folder: epath.Path, content: Mapping[str, Any]) -> bool:
  """Returns whether a complete drafter of the same step and plan is there."""
  path, found = folder / card_lib.NAME, {}
  if distributed.is_first() and path.exists():
    found = files.read_json(path).get('training', {})
  names = ('steps', 'decay_start', 'last_step')
  is_same = all(found.get(x) == content['training'][x] for x in names)
  return bool(distributed.from_first(np.asarray([is_same]))[0])


def _remove(folder: epath.Path) -> None:
  if distributed.is_first() and files.is_folder(folder):
    folder.rmtree()
