"""The data that a run reads from its folders.

Some shards of each folder are for training, and some are held out. They are
fixed when the run begins: its journal has their digests.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from experiments.training import training as training_lib
from experiments.training_data import batches as batches_lib
from experiments.training_data import data_folder
from experiments.training_data import features
from experiments.training_data.dialogues import Dialogue
import specsample


def load(
  folders: Sequence[str], target: specsample.Loaded
) -> list[data_folder.Data]:
  """Reads all data in the folders."""
  for folder in folders:
    if folders.count(folder) > 1:
      raise ValueError(f'--data names {folder} twice: give each folder once')
  return [data_folder.load_for(folder, target) for folder in folders]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainingData:
  """The shards that a run reads from each folder."""

  folders: Sequence[data_folder.Data]  # shards that are not read are empty
  train: Sequence[Sequence[int]]  # [folders]: numbers of shards
  held_out: Sequence[Sequence[int]]  # likewise

  @classmethod
  def of(
    cls,
    training: training_lib.Training,
    folders: Sequence[data_folder.Data],
  ) -> 'TrainingData':
    """Chooses the shards."""
    every = training.held_out_every
    train = [data.to_train(every, training.max_tokens) for data in folders]
    held_out = [
      data.to_hold_out(every, training.held_out_answers) for data in folders
    ]
    read = [
      data.only([*train[i], *held_out[i]]) for i, data in enumerate(folders)
    ]
    return cls(folders=read, train=train, held_out=held_out)

  def digests(self) -> list[str]:
    """Returns a digest of what is read from each folder."""
    return [data.digest() for data in self.folders]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Split:
  """The examples to train on, and the held-out examples."""

  train: list[batches_lib.Example]
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
    """
    whole = training.objective.reads_prompt or not training.cache_hidden

    def examples(
      folder: int, number: int
    ) -> Iterator[tuple[Dialogue, batches_lib.Example]]:
      shard = data.folders[folder].shards[number]
      found = [{}] * len(shard) if vectors is None else vectors[folder][number]
      for dialogue, of_it in zip(shard, found, strict=True):
        yield dialogue, batches_lib.example(dialogue, of_it, whole)

    train = [
      example
      for i, numbers in enumerate(data.train)
      for number in numbers
      for _, example in examples(i, number)
    ]
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
    return cls(train=train, held_out=held_out, prompts=prompts)


def draft_vocabulary(
  split: Split, size: int | None, vocab_size: int
) -> np.ndarray | None:
  """Returns the `size` most frequent answer tokens, ascending; None for all."""
  if size is None:
    return None
  counts = np.zeros(vocab_size, np.int64)
  for example in split.train:
    np.add.at(counts, example.learned, 1)
  # Stable: the tokenizer's earlier merges win among equally frequent tokens.
  return np.sort(np.argsort(-counts, kind='stable')[:size]).astype(np.int32)
