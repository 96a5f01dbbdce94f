"""The data that a run reads from its folders, which may grow between starts.

Some shards of each folder are for training, and some are held out. The journal
records the digest of every shard that was read, phase by phase (`schedule`).
What has been read must stay as it was, with the folders in the same order; new
shards and folders come after it.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from experiments.training import training as training_lib
from experiments.training_data import batches as batches_lib
from experiments.training_data import data_folder
from experiments.training_data import features
from experiments.training_data import schedule
from experiments.training_data.dialogues import Dialogue
import specsample

# A phase as the journal has it: 'first_step', and for each folder its 'name'
# and the digests of its new shards, 'train' and 'held_out'.
Record = Mapping[str, Any]


def load(
  folders: Sequence[str], target: specsample.Loaded
) -> list[data_folder.Data]:
  """Reads all data in the folders.

  Raises:
    ValueError: a folder is named twice, or holds no data for this target.
  """
  for folder in folders:
    if folders.count(folder) > 1:
      raise ValueError(f'--data names {folder} twice: give each folder once')
  return [data_folder.load_for(folder, target) for folder in folders]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainingData:
  """The shards that a run reads from each folder, and in which phase."""

  folders: Sequence[data_folder.Data]  # shards that are not read are empty
  # [phases][folders]: the numbers of the new shards to train on.
  train: Sequence[Sequence[Sequence[int]]]
  held_out: Sequence[Sequence[int]]  # [folders]: shards of the first phase
  first_steps: Sequence[int]  # [phases]

  @classmethod
  def of(
    cls,
    training: training_lib.Training,
    folders: Sequence[data_folder.Data],
    records: Sequence[Record],
  ) -> 'TrainingData':
    """Returns the data that a run has read so far.

    Args:
      training: the settings.
      folders: all data that are there now.
      records: the journal's phases so far, at least one.

    Raises:
      ValueError: a folder or shard that was read is missing or has changed.
    """
    before = max(len(record['folders']) for record in records)
    if len(folders) < before:
      raise ValueError(
        f'--data names {len(folders)} folders, but this run has read {before}: '
        'give them all in the same order, new ones last'
      )
    train = []
    last = [-1] * len(folders)
    held_out: list[list[int]] = [[] for _ in folders]
    for record in records:
      new = []
      for i, (data, found) in enumerate(
        zip(folders, record['folders'], strict=False)
      ):
        own, others = data.numbers(training.held_out_every)
        new.append(_find(data, [n for n in own if n > last[i]], found['train']))
        last[i] = max([last[i], *new[-1]])
        held_out[i] += _find(data, others, found['held_out'])
      train.append(new + [[]] * (len(folders) - len(new)))
    return cls._with(
      folders, train, held_out, [x['first_step'] for x in records]
    )

  @classmethod
  def _with(cls, folders, train, held_out, first_steps):
    read = [
      data.only([*held_out[i], *(n for phase in train for n in phase[i])])
      for i, data in enumerate(folders)
    ]
    return cls(
      folders=read, train=train, held_out=held_out, first_steps=first_steps
    )

  @classmethod
  def first(
    cls,
    training: training_lib.Training,
    folders: Sequence[data_folder.Data],
  ) -> 'TrainingData':
    """Returns the data that a run begins with.

    Raises:
      ValueError: a folder has nothing to train on.
    """
    every = training.held_out_every
    train = [data.to_train(every, training.max_tokens) for data in folders]
    held_out = [
      data.to_hold_out(every, training.held_out_answers) for data in folders
    ]
    return cls._with(folders, [train], held_out, [0])

  def grown(
    self,
    training: training_lib.Training,
    folders: Sequence[data_folder.Data],
    first_step: int,
  ) -> 'TrainingData | None':
    """Returns the data with the new shards as a phase that begins at a step.

    Returns None if nothing is new.

    Raises:
      ValueError: a folder has nothing to train on.
    """
    new = []
    for i, data in enumerate(folders):
      wanted = data.to_train(training.held_out_every, training.max_tokens)
      known = {n for phase in self.train for n in phase[i]}
      new.append([n for n in wanted if n not in known])
    if not any(new):
      return None
    return self._with(
      folders,
      [*self.train, new],
      self.held_out,
      [*self.first_steps, first_step],
    )

  def record(self) -> dict[str, Any]:
    """Returns the last phase, for the journal."""
    digests = lambda data, numbers: [
      data_folder.digest(data.shards[n]) for n in numbers
    ]
    is_first = len(self.train) == 1
    return {
      'first_step': self.first_steps[-1],
      'folders': [
        {
          'name': str(data.folder),
          'train': digests(data, self.train[-1][i]),
          'held_out': digests(data, self.held_out[i]) if is_first else [],
        }
        for i, data in enumerate(self.folders)
      ],
    }


def _find(data, numbers, digests) -> list[int]:
  """Returns the numbers whose shards have these digests, in the same order."""
  left = iter(numbers)
  found = []
  for digest in digests:
    is_it = lambda n: data_folder.digest(data.shards[n]) == digest  # noqa: B023
    number = next(filter(is_it, left), None)
    if number is None:
      raise ValueError(
        f'{data.folder} lacks a shard that this run has read, or has another '
        'one in its place: give the folders of the run as they were, in the '
        'same order, or give another --out'
      )
    found.append(number)
  return found


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Split:
  """The examples to train on, phase by phase, and the held-out examples."""

  train: list[batches_lib.Example]
  phases: list[schedule.Phase]
  held_out: list[batches_lib.Example]
  prompts: list[np.ndarray]  # [n] int32 each, of all held-out dialogues

  @classmethod
  def of(
    cls,
    training: training_lib.Training,
    data: TrainingData,
    vectors: Sequence[list[list[features.Vectors]]] | None,
  ) -> 'Split':
    """Turns the dialogues into examples.

    Args:
      training: the settings.
      data: the shards that the run reads.
      vectors: the target's vectors by folder, shard and dialogue; None if they
        are not at hand.

    Raises:
      ValueError: no greedy answer is held out.
    """
    whole = training.objective.reads_prompt or not training.cache_hidden

    def examples(
      folder: int, number: int
    ) -> Iterator[tuple[Dialogue, batches_lib.Example]]:
      shard = data.folders[folder].shards[number]
      found = [{}] * len(shard) if vectors is None else vectors[folder][number]
      for dialogue, of_it in zip(shard, found, strict=True):
        yield dialogue, batches_lib.example(dialogue, of_it, whole)

    train: list[batches_lib.Example] = []
    phases = []
    for first_step, phase in zip(data.first_steps, data.train, strict=True):
      for i, numbers in enumerate(phase):
        train += [x for n in numbers for _, x in examples(i, n)]
      phases.append(schedule.Phase(first_step, len(train)))
    held_out, prompts = [], []
    for i, numbers in enumerate(data.held_out):
      pairs = [pair for n in numbers for pair in examples(i, n)]
      greedy = [x for dialogue, x in pairs if dialogue.temperature == 0]
      held_out += greedy[: training.held_out_answers]
      prompts += [d.tokens[: d.answers[0][0]] for d, _ in pairs]
    if not held_out:
      names = ', '.join(str(x.folder) for x in data.folders)
      raise ValueError(
        f'no held-out answer in {names} is greedy: make more data with '
        'Synthesis.greedy_share above 0, or add a folder of greedy answers'
      )
    return cls(train=train, phases=phases, held_out=held_out, prompts=prompts)


def draft_vocabulary(
  split: Split, size: int | None, vocab_size: int
) -> np.ndarray | None:
  """Returns the `size` most frequent answer tokens, ascending; None for all.

  Only the first phase counts: data that are added later change nothing.
  """
  if size is None:
    return None
  counts = np.zeros(vocab_size, np.int64)
  for example in split.train[: split.phases[0].num_examples]:
    np.add.at(counts, example.learned, 1)
  # Stable: the tokenizer's earlier merges win among equally frequent tokens.
  return np.sort(np.argsort(-counts, kind='stable')[:size]).astype(np.int32)
