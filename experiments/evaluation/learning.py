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

from experiments.command import environment
from experiments.command import journal as journal_lib
from experiments.command import units as units_lib
from experiments.decoding import setup as setup_lib
from experiments.evaluation import conversations
from experiments.evaluation import evaluation as evaluation_lib
from experiments.reporting import ratios
from experiments.reporting import rows as rows_lib
from experiments.reporting import tables
from experiments.training import train_state
import specsample
from specsample import checks
from specsample.drafter import Drafter
from specsample.drafters import trainable
from specsample.loading import card
from specsample.training import objective as objective_lib
from specsample.training import online
from specsample.types import Output

# Equal parts of a run that have a row each; fewer if there are fewer batches.
_PARTS = 6
# The measures of `ratios` that a part has.
_MEASURED = (
  *('acceptance', 'acceptance_ci95'),
  *('tokens_per_round', 'tokens_per_round_ci95'),
)
# What is known after a batch, and the reports of its updates.
Found = tuple[online.Learned, list[dict[str, Any]]]


@gin.configurable
def learner(
  drafter: Drafter,
  *,
  objective: Callable[..., objective_lib.Objective],
  learning_rate: float = 3e-4,
  rounds: int = 16,
  rejected_only: bool = True,
  window: int = 128,
  num_steps: int = 1,
) -> online.Learner:
  """Returns an `online.Learner` with Adam at a constant rate.

  Gradients longer than 1 are scaled to it, and `objective` is called with the
  drafter as `drafter`. The other settings are `online.Learner`'s.
  """
  if learning_rate <= 0:
    raise ValueError(
      f'learner.learning_rate is {learning_rate}: give more than 0'
    )
  checks.instance(
    'the drafter that learns',
    drafter,
    trainable.Trainable,
    'give one that specsample.save_drafter can save, such as DraftModel',
  )
  return online.Learner(
    objective=objective(drafter=drafter),
    optimizer=optax.chain(
      optax.clip_by_global_norm(1.0), optax.adam(learning_rate, b2=0.99)
    ),
    rounds=rounds,
    rejected_only=rejected_only,
    window=window,
    num_steps=num_steps,
  )


def learners(
  evaluation: evaluation_lib.Evaluation,
) -> dict[str, online.Learner]:
  """Returns the learner of each method that learns, by the method's name."""
  found, num_processes = {}, jax.process_count()
  for name, make in evaluation.learners.items():
    method, fault = evaluation.methods.get(name), ''
    if method is None:
      fault = 'no method has this name: correct it'
    elif num_processes > 1:
      fault = (
        f'there are {num_processes} processes, and drafters learn in one only: '
        'start one'
      )
    elif evaluation.samples > 1:
      fault = (
        f'num_seeds is {evaluation.samples}: give 1, or it would draft for a '
        'prompt from which it has learned'
      )
    elif isinstance(method.verify, specsample.verify.Certified):
      fault = (
        'its rule is Certified, and updates drop the shadow that this needs: '
        'give another rule'
      )
    if method is None or fault:
      raise ValueError(f'Evaluation.learners has {name!r}, but {fault}')
    found[name] = make(drafter=method.drafter)
  return found


@dataclasses.dataclass(eq=False)
class Learning:
  """A method that learns, and what it has learned so far."""

  name: str  # of the method
  setup: setup_lib.Setup  # before it learns
  learner: online.Learner
  journal: journal_lib.Journal  # has the step of each batch's checkpoint
  known: online.Learned = dataclasses.field(init=False)

  def __post_init__(self):
    """Begins with what is known after all batches that the journal has."""
    self.known = online.init(self.setup.params, self.learner)
    if self._batches:
      step = max(batch['step'] for batch in self._batches)
      train = self._checkpoints.restore(self.known.train, step)
      self.known = dataclasses.replace(self.known, train=train)
    elif self.folder.exists():
      self.folder.rmtree()  # of a run whose journal has gone, or has no batch

  @property
  def folder(self) -> epath.Path:
    """The folder of the checkpoints and of the drafter."""
    name = urllib.parse.quote(self.name, safe=' ,+=')
    return epath.Path(self.journal.folder) / 'learned' / name

  @property
  def _batches(self):
    return conversations.batches(self.journal, self.name).values()

  @functools.cached_property
  def _checkpoints(self):
    return train_state.Checkpoints(self.folder / 'checkpoints')

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
      known,
      tokens,
      lengths,
      setup.key,
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
    """Compiles what `decode` runs, by decoding; nothing is kept."""
    self.decode(prompts, request_ids, self.known)

  def learn(self, found: Found) -> dict[str, int]:
    """Keeps what `decode` found; returns what the journal records of it.

    The checkpoint before stays, in case of a kill before the journal has this.
    """
    self.known, reports = found
    self._checkpoints.save(self.known.train)
    return {
      'step': int(self.known.train.step),
      'updates': len(reports),
      'undone': sum(not report['is_finite'] for report in reports),
    }

  def saving(self) -> units_lib.Unit:
    """Returns the work of saving the drafter, once all batches are decoded."""
    folder = self.folder / 'drafter'
    return units_lib.Unit(
      f'drafter of {self.name}',
      ('drafter', self.name),
      functools.partial(self._save, folder),
      is_lost=not (folder / card.NAME).exists(),
    )

  def _save(self, folder):
    facts = {
      'learned': 'online, while drafting (experiments.evaluate)',
      'updates': sum(batch['updates'] for batch in self._batches),
    }
    if not (folder / card.NAME).exists():
      specsample.save_drafter(
        folder,
        cast(trainable.Trainable, self.setup.method.drafter),
        online.params_of(self.known, self.learner)['drafter'],
        target=self.setup.target.fingerprint,
        card=facts | environment.describe(),
      )
    return facts


def methods(part: evaluation_lib.Part) -> dict[str, Learning]:
  """Returns the methods that learn, with what they learned in a run so far."""
  setup = lambda name: part.evaluation.setup(part.evaluation.methods[name])
  return {
    name: Learning(name, setup(name), learner, part.journal)
    for name, learner in part.learners.items()
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
  """A method over some batches in the order of decoding.

  A method that learns has a twin, the first method with the same drafter and
  rule that does not learn; the other methods have none.
  """

  method: str = tables.shown('method', 'as the configuration calls it')
  batches: str = tables.shown('batches', 'the first and the last, from 1')
  tokens: int = tables.shown('tokens', 'that were emitted')
  acceptance: float | None = tables.shown(
    'acceptance', 'as in the other tables', '.3f'
  )
  acceptance_ci95: list[float] | None
  tokens_per_round: float = tables.shown(
    'tokens per round', 'as in the other tables', '.3f'
  )
  tokens_per_round_ci95: list[float] | None
  fixed: str | None = tables.shown('fixed', 'the twin of a method that learns')
  acceptance_over_fixed: float | None = tables.shown(
    'acceptance over fixed', "divided by the twin's", '.3f'
  )
  acceptance_over_fixed_ci95: list[float] | None
  updates: int = tables.shown('updates', 'of the weights')
  undone: int = tables.shown('undone', 'updates that gave NaN or infinity')


WINDOW_NAMES = tuple(tables.columns(Window))


def windows(
  evaluation: evaluation_lib.Evaluation,
  batches: Mapping[str, Sequence[dict[str, Any]]],
) -> list[Window]:
  """Returns the windows of each method that drafts; none if none learns.

  `batches` are the journal's records of each method, in order of decoding.
  """
  if not evaluation.learners:
    return []
  found = []
  for name, method in evaluation.methods.items():
    if not method.drafter.num_draft_tokens:
      continue
    twin = _twin(evaluation, name) if name in evaluation.learners else None
    everything = np.arange(len(batches[name]))
    parts = np.array_split(everything, min(_PARTS, everything.size))
    for part in (everything, *parts):
      records = [batches[name][i] for i in part]
      runs = _generations(records)
      measured = ratios.measure(runs)
      ratio = ci95 = None
      if twin is not None:
        others = _generations([batches[twin][i] for i in part])
        ratio, ci95 = ratios.ratio(runs, others, 'acceptance')
      window = Window(
        method=name,
        batches=f'{part[0] + 1} to {part[-1] + 1}',
        tokens=sum(len(run.tokens) for run in runs),
        **{key: measured[key] for key in _MEASURED},
        fixed=twin,
        acceptance_over_fixed=ratio,
        acceptance_over_fixed_ci95=ci95,
        updates=sum(record.get('updates', 0) for record in records),
        undone=sum(record.get('undone', 0) for record in records),
      )
      found.append(window)
  return found


def _twin(evaluation, name) -> str | None:
  method = evaluation.methods[name]
  same = [
    other
    for other, one in evaluation.methods.items()
    if (one.drafter, one.verify) == (method.drafter, method.verify)
    if other not in evaluation.learners
  ]
  return same[0] if same else None


def _generations(records):
  return [
    rows_lib.Generation.from_json(generation)
    for record in records
    for generation in record['generations']
  ]
