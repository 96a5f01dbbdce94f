"""Drafters that learn while they draft, and how well they do.

`training.online` updates a drafter between rounds. When it drafts for a batch
of prompts, it has learned only from the batches before and from earlier rounds
of the same batch, so no draft is counted after the drafter has learned from it.

What was learned is checkpointed beside the journal after each batch, so that a
resumed run has the tokens and the weights of an uninterrupted one.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, cast
import urllib.parse

from etils import epath
import gin
import jax
import numpy as np
import optax

from experiments import methods as methods_lib
from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import turns
from experiments.training import train_state
import specsample
from specsample import checks
from specsample.drafters import trainable
from specsample.loading import card
from specsample.training import objective as objective_lib
from specsample.training import online
from specsample.types import Drafter, Output

# What is known after a batch, and the reports of its updates.
Found = tuple[online.Learned, list[dict[str, Any]]]


@gin.configurable
def learner(
  drafter: Drafter,
  *,
  objective: Callable[..., objective_lib.Objective],
  learning_rate: float = 3e-4,
  b2: float = 0.99,
  clip_norm: float = 1.0,
  rounds: int = 16,
  rejected_only: bool = True,
  window: int = 128,
  num_steps: int = 1,
) -> online.Learner:
  """Returns an `online.Learner` with Adam at a constant rate.

  Args:
    drafter: learns.
    objective: makes the objective, given the drafter as `drafter`.
    learning_rate, b2: of Adam.
    clip_norm: longer gradients are scaled to this norm.
    rounds, rejected_only, window, num_steps: as in `online.Learner`.
  """
  if min(learning_rate, clip_norm) <= 0:
    raise ValueError(
      f'learner.learning_rate is {learning_rate} and learner.clip_norm is '
      f'{clip_norm}: give more than 0'
    )
  checks.instance(
    *('the drafter that learns', drafter, trainable.Trainable),
    'give one that specsample.save_drafter can save, such as DraftModel',
  )
  return online.Learner(
    objective=objective(drafter=drafter),
    optimizer=optax.chain(
      optax.clip_by_global_norm(clip_norm), optax.adam(learning_rate, b2=b2)
    ),
    rounds=rounds,
    rejected_only=rejected_only,
    window=window,
    num_steps=num_steps,
  )


def learners(
  make: Mapping[str, Callable[..., online.Learner]],
  methods: Mapping[str, methods_lib.Method],
  samples: int,
) -> dict[str, online.Learner]:
  """Returns the learner of each method that learns.

  Args:
    make: `Evaluation.learners`.
    methods: those of the evaluation.
    samples: how often each prompt is decoded.

  Raises:
    ValueError: a method does not exist or cannot learn, or drafters cannot
      learn in this run.
  """
  found = {}
  for name, of_drafter in make.items():
    learns = f'Evaluation.learners has {name!r}, but'
    if name not in methods:
      raise ValueError(f'{learns} no method has this name: correct it')
    if jax.process_count() > 1:
      raise ValueError(
        f'{learns} there are {jax.process_count()} processes, and drafters '
        'learn in one only: start one'
      )
    if samples > 1:
      raise ValueError(
        f'{learns} num_seeds is {samples}: give 1, or it would draft for a '
        'prompt from which it has learned'
      )
    if isinstance(methods[name].verify, specsample.verify.Certified):
      raise ValueError(
        f'{learns} its rule is Certified, and updates drop the shadow that '
        'this needs: give another rule'
      )
    found[name] = of_drafter(drafter=methods[name].drafter)
  return found


@dataclasses.dataclass(eq=False)
class Learning:
  """A method that learns, and what it has learned so far.

  Attributes:
    name: of the method.
    setup: the method before it learns.
    learner: how it learns.
    journal: the run's; it has the step of each batch's checkpoint.
  """

  name: str
  setup: setup_lib.Setup
  learner: online.Learner
  journal: journal_lib.Journal
  _known: online.Learned | None = None

  @property
  def folder(self) -> epath.Path:
    """The folder of the checkpoints and of the drafter."""
    name = urllib.parse.quote(self.name, safe=' ,+=')
    return epath.Path(self.journal.folder) / 'learned' / name

  @property
  def _batches(self):
    return self.journal.of(*turns.key(self.name, 0)[:2])

  @functools.cached_property
  def _checkpoints(self):
    return train_state.Checkpoints(self.folder / 'checkpoints')

  def before(self, key: tuple | None) -> online.Learned:
    """Returns what is known before a batch.

    Args:
      key: the journal's key of the batch before it, which an earlier run may
        have decoded; None for the first batch.
    """
    if key is None and self.folder.exists():
      self.folder.rmtree()  # of a run whose journal has gone, or has no batch
    if self._known is None:
      self._known = self._at(self.journal[key]['step'] if key else 0)
    return self._known

  def decode(
    self,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
    known: online.Learned,
  ) -> tuple[Output, Found]:
    """Decodes prompts as one batch, with updates between the rounds."""
    setup = self.setup
    tokens, lengths = setup_lib.padded(prompts, setup.least_width)
    output, after, reports = online.generate(
      *(known, tokens, lengths, setup.key),
      learner=self.learner,
      request_ids=np.asarray(request_ids, np.int32),
      model=setup.target.model,
      verify=setup.method.verify,
      sampling=setup.sampling,
      max_new_tokens=setup.max_new_tokens,
      stop=setup.stop,
    )
    return output, (after, reports)

  def warm_up(
    self, prompts: Sequence[list[int]], request_ids: Sequence[int]
  ) -> None:
    """Compiles what `decode` runs, by decoding; nothing is learned yet."""
    self.decode(prompts, request_ids, self._at(0))

  def learn(self, found: Found) -> dict[str, int]:
    """Keeps what `decode` found; returns what the journal records of it.

    The checkpoint before stays, in case of a kill before the journal has this.
    """
    self._known, reports = found
    self._checkpoints.save(self._known.train)
    return {
      'step': int(self._known.train.step),
      'updates': len(reports),
      'undone': sum(not report['is_finite'] for report in reports),
    }

  def last(self) -> online.Learned:
    """Returns what is known after all batches that the journal has.

    Raises:
      ValueError: the last checkpoint is absent or damaged.
    """
    return self._at(max((one['step'] for one in self._batches), default=0))

  def saving(self) -> units_lib.Unit:
    """Returns the work of saving the drafter, once all batches are decoded."""
    folder = self.folder / 'drafter'
    is_saved = (folder / card.NAME).exists()
    return units_lib.Unit(
      f'drafter of {self.name}',
      ('drafter', self.name),
      functools.partial(self._save, None if is_saved else folder),
      is_lost=not is_saved,
    )

  def _save(self, folder):
    facts = {
      'learned': 'online, while drafting (experiments.evaluate)',
      'updates': sum(batch['updates'] for batch in self._batches),
    }
    if folder is not None:
      specsample.save_drafter(
        folder,
        cast(trainable.Trainable, self.setup.method.drafter),
        online.params_of(self.last(), self.learner)['drafter'],
        target=self.setup.target.fingerprint,
        card=facts | environment.describe(),
      )
    return facts

  def _at(self, step: int) -> online.Learned:
    known = online.init(self.setup.params, self.learner)
    if step:
      train = self._checkpoints.restore(known.train, step)
      known = dataclasses.replace(known, train=train)
    return known
