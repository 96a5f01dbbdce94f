"""Scores of an evaluation: what cannot be scored now is scored another time."""

import dataclasses

from experiments import evaluation
from experiments import journal as journal_lib
from experiments import methods
from experiments import progress
from experiments import prompts
from experiments import scoring
from experiments import units
from experiments.tasks import task
import specsample
from specsample import loading
from specsample.testing import hash_model


@dataclasses.dataclass
class _Sometimes:
  """A task that scores where it can."""

  can: bool = True
  finds: bool = True
  chat: bool = True

  def unscored(self):
    return None if self.can else 'not here'

  def score(self, asked, answers):
    del asked
    return [task.average('score', [1.0 for _ in answers])] if self.finds else []


def _scored(checkpoint, folder, of_task):
  """What a journal has of scores, after another run of the same command."""
  model = hash_model.HashModel(vocab_size=16)
  compared = evaluation.Evaluation(
    target=loading.Loaded(model, {}, specsample.load(checkpoint).tokenizer),
    methods={'none': methods.Method(specsample.drafters.NoDraft())},
    sampling=specsample.Sampling(),
    max_new_tokens=2,
    task=of_task,
  )
  asked = [prompts.Prompt('0', '', '', line=1)]
  journal = journal_lib.Journal(folder, {})
  try:
    work = [
      *evaluation.units(compared, asked, [[1, 2]]),
      *scoring.units(compared, asked, journal),
    ]
    units.run(work, journal, progress.bar)
    return journal.of('scores')
  finally:
    journal.close()


def test_what_failed_once_is_tried_again(checkpoint, tmp_path):
  # The probe fails before decoding; the task when it is asked for scores.
  assert _scored(checkpoint, tmp_path, _Sometimes(can=False)) == []
  assert _scored(checkpoint, tmp_path, _Sometimes(finds=False)) == []
  (found,) = _scored(checkpoint, tmp_path, _Sometimes())
  assert found['scores'][0]['value'] == 1.0
  # What is there stays.
  assert _scored(checkpoint, tmp_path, _Sometimes(finds=False)) == [found]
