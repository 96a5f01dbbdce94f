"""The drafter that a server has trained, saved after the last batch."""

from etils import epath

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.online_learning import server as serving_lib
from experiments.training import train_state
import specsample
from specsample.loading import card
from specsample.training import online


def check(
  folder: epath.Path, journal: journal_lib.Journal, num_batches: int
) -> None:
  """Refuses a drafter that exists before all batches were served.

  A run writes its drafter in one piece, after the last batch. A drafter that is
  found later is therefore its own, whenever the run was killed.

  Raises:
    ValueError: names the folder.
  """
  served = len(journal.of(serving_lib.LEARNING))
  if served < num_batches:
    train_state.refuse_results(
      folder, f'has served {served} of {num_batches} batches'
    )


def save(
  folder: epath.Path,
  serving: serving_lib.Serving,
  learned: online.Learned,
  journal: journal_lib.Journal,
) -> None:
  """Saves the current drafter for `specsample.load_drafter`.

  Does nothing if a complete drafter exists; `check` says why it is this run's.
  """
  if (folder / card.NAME).exists():
    return
  records = journal.of(serving_lib.LEARNING)
  specsample.save_drafter(
    folder,
    serving.drafter,
    online.params_of(learned, serving.learner)['drafter'],
    target=serving.target.fingerprint,
    card={
      'learned': 'online, from rejected drafts (experiments.online)',
      'tokens_served': sum(sum(record['tokens']) for record in records),
      'updates': sum(len(record['updates']) for record in records),
    }
    | environment.describe(),
  )
