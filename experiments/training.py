"""How a drafter is trained: what gin sets, and what follows from it."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import gin
import jax
import numpy as np
import optax

from experiments import batches as batches_lib
from experiments import data_folder
from experiments import features
import specsample
from specsample import drafters
from specsample.training import losses
from specsample.training import objective as objective_lib
from specsample.training import slots

# So that a binding can name them: DraftObjective.teacher_loss = @losses.jsd
for _loss in (
  losses.forward_kl,
  losses.reverse_kl,
  losses.jsd,
  losses.total_variation,
  losses.negative_log_acceptance,
  losses.hybrid,
):
  gin.external_configurable(_loss, module='losses')
# HeadsObjective.slot_weights = @slots.d_pace
gin.external_configurable(slots.d_pace, module='slots')


@gin.configurable
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Training:
  """One run of the trainer.

  AdamW, the learning rate rising linearly and falling as a cosine.
  """

  target: specsample.Loaded
  objective: objective_lib.Objective  # which has the drafter
  epochs: float = 4.0
  batch_size: int = 8
  max_length: int = 256  # of an example; longer ones are cut off
  width_multiple: int = 32  # batches are that wide, or twice, ...
  seed: int = 0  # of the order, the first weights and what is sampled
  learning_rate: float = 1e-3
  warmup: float = 0.02  # the share of the steps in which it rises
  weight_decay: float = 0.0
  b2: float = 0.99
  clip_norm: float = 1.0  # of the gradient
  # Medusa-2: the target learns too, once the heads have, at this rate. None
  # leaves it as it is, and its distribution with it.
  target_learning_rate: float | None = None
  target_warmup: float = 0.25  # the share of the steps before it does
  # Of each folder's answers to train on: the first shards that have so many,
  # None for all.
  max_tokens: int | None = None
  # Of each folder shards 0, n, 2 n, ... are held out; of their greedy answers
  # so many count.
  held_out_every: int = 16
  held_out_answers: int = 256
  # Whether the target's vectors are found once and kept beside the data.
  cache_hidden: bool = True
  # DistillSpec: the share of steps on what the draft model itself writes.
  on_policy_share: float = 0.0
  on_policy_temperature: float = 1.0
  report_every: int = 50  # steps between two lines of metrics
  evaluations: int = 8  # on what is held out
  checkpoint_seconds: float = 60.0

  def __post_init__(self):
    """Refuses settings that train nothing; ValueError names one."""
    positive = (
      *('epochs', 'batch_size', 'max_length', 'width_multiple', 'clip_norm'),
      *('learning_rate', 'held_out_answers', 'report_every', 'evaluations'),
      'on_policy_temperature',
    )
    for name in positive:
      _require(name, getattr(self, name), getattr(self, name) > 0, 'above 0')
    for name in ('warmup', 'target_warmup', 'on_policy_share'):
      share = getattr(self, name)
      _require(name, share, 0 <= share <= 1, 'from 0 to 1')
    for name in ('target_learning_rate', 'max_tokens'):
      value = getattr(self, name)
      _require(name, value, value is None or value > 0, 'above 0, or None')
    if self.trains_target and self.cache_hidden:
      raise ValueError(
        'Training.cache_hidden is True and target_learning_rate '
        f'{self.target_learning_rate}: the vectors of a target that is trained '
        'change, so set cache_hidden = False'
      )
    if self.trains_target and self.target.exact_fingerprint is not None:
      raise ValueError(
        f'Training.target_learning_rate is {self.target_learning_rate}, and '
        'the weights of the target are of int8, which do not learn: load it '
        'with weights = None, or set target_learning_rate = None'
      )
    drafter = self.objective.drafter
    if self.on_policy_share and not isinstance(drafter, drafters.DraftModel):
      raise ValueError(
        f'Training.on_policy_share is {self.on_policy_share}, and '
        f'{type(drafter).__name__} is no model that could write answers: set '
        'it to 0, or train a DraftModel'
      )
    if self.on_policy_share and self.objective.token_weight:
      raise ValueError(
        f'Training.on_policy_share is {self.on_policy_share} and token_weight '
        f'{self.objective.token_weight}: what the draft model writes is no '
        'example, so set token_weight = 0 and teacher_weight = 1'
      )

  @property
  def trains_target(self) -> bool:
    """Whether the target changes too."""
    return self.target_learning_rate is not None

  def optimizer(self, num_steps: int) -> optax.GradientTransformation:
    """Of the whole tree of parameters."""
    adam = lambda peak, start: optax.adamw(
      _schedule(peak, round(start * num_steps), self.warmup, num_steps),
      b2=self.b2,
      weight_decay=self.weight_decay,
    )
    clip = optax.clip_by_global_norm(self.clip_norm)
    if not self.trains_target:
      return optax.chain(clip, adam(self.learning_rate, 0.0))
    rates = {
      'drafter': adam(self.learning_rate, 0.0),
      'target': adam(self.target_learning_rate, self.target_warmup),
    }
    return optax.chain(clip, optax.partition(rates, _label))

  def settings(self) -> dict[str, Any]:
    """As the card has them, JSON."""
    own = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ('target', 'objective')
    }
    objective = {
      field.name: getattr(self.objective, field.name)
      for field in dataclasses.fields(self.objective)
      if field.name != 'drafter'
    }
    name = lambda value: getattr(value, '__name__', value)
    return own | {'objective': {k: name(v) for k, v in objective.items()}}


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """What is learned, and the greedy answers held out to see how well."""

  train: list[batches_lib.Example]
  held_out: list[batches_lib.Example]

  @classmethod
  def of(
    cls,
    training: Training,
    data: Sequence[data_folder.Data],
    vectors: Sequence[list[list[features.Vectors]]] | None,
  ) -> 'Split':
    """Returns the split of the data of all folders.

    Args:
      training: says which shards are held out, and how many answers of them.
      data: one per folder.
      vectors: the target's, per folder, shard and dialogue; None if they are
        not at hand.

    Raises:
      ValueError: no held-out answer of any folder is greedy.
    """
    of_folders: Sequence[Any] = vectors or [None] * len(data)
    parts = [
      cls._of_folder(training, part, found)
      for part, found in zip(data, of_folders, strict=True)
    ]
    found = cls(
      [example for part in parts for example in part.train],
      [example for part in parts for example in part.held_out],
    )
    if not found.held_out:
      folders = ' and '.join(str(part.folder) for part in data)
      raise ValueError(
        f'no held-out answer of {folders} is greedy: make more data with '
        'Synthesis.greedy_share above 0, or add a folder of greedy answers'
      )
    return found

  @classmethod
  def _of_folder(cls, training, data, vectors):
    whole = training.objective.reads_prompt or not training.cache_hidden
    train, held_out = [], []
    for number, shard in enumerate(data.shards):
      of_shard = [{}] * len(shard) if vectors is None else vectors[number]
      for dialogue, found in zip(shard, of_shard, strict=True):
        example = batches_lib.example(dialogue, found, whole)
        if number % training.held_out_every:
          train.append(example)
        elif dialogue.temperature == 0:
          held_out.append(example)
    return cls(train, held_out[: training.held_out_answers])


def draft_vocabulary(
  examples: Sequence[batches_lib.Example], size: int | None, vocab_size: int
) -> np.ndarray | None:
  """The `size` most frequent tokens of answers, ascending; None for all."""
  if size is None:
    return None
  counts = np.zeros(vocab_size, np.int64)
  for example in examples:
    np.add.at(counts, example.learned, 1)
  # Stable: of equally frequent tokens those that the tokenizer merged first.
  return np.sort(np.argsort(-counts, kind='stable')[:size]).astype(np.int32)


def _schedule(peak, start, warmup, num_steps):
  """0 up to step `start`, then a warmup and a cosine."""
  length = max(num_steps - start, 2)
  rise = min(max(round(warmup * length), 1), length - 1)
  rising = optax.warmup_cosine_decay_schedule(peak / rise, peak, rise, length)
  return optax.join_schedules([optax.constant_schedule(0.0), rising], [start])


def _label(params):
  """Which of the two a parameter belongs to."""
  return {
    name: jax.tree.map(lambda _, name=name: name, tree)
    for name, tree in params.items()
  }


def _require(name, value, holds, expected):
  if not holds:
    raise ValueError(f'Training.{name} is {value}: give {expected}')
