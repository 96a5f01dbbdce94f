"""The data that a run reads from its folders.

Some shards of each folder are for training, and some are held out.
"""

from collections.abc import Sequence
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
  return [data_folder.load(folder, target) for folder in folders]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Split:
  """The examples to train on, and the held-out examples."""

  train: list[batches_lib.Example]
  held_out: list[batches_lib.Example]
  prompts: list[np.ndarray]  # [n] int32 each, of all held-out dialogues


def split(
  training: training_lib.Training,
  data: Sequence[data_folder.Data],
  vectors: Sequence[Sequence[list[features.Vectors] | None]] | None,
) -> Split:
  """Turns the dialogues into examples.

  Args:
    training: the settings.
    data: the folders.
    vectors: the target's vectors by folder, shard and dialogue; None if they
      are not at hand.
  """
  whole = training.objective.reads_prompt or not training.cache_hidden
  train, held_out, prompts = [], [], []
  nothing = [[None] * len(folder.shards) for folder in data]
  for folder, of_shards in zip(data, vectors or nothing, strict=True):
    to_train, to_hold_out = folder.numbers(training.held_out_every)
    for number in to_train:
      train += _examples(folder.shards[number], of_shards[number], whole)
    greedy = []
    for number in to_hold_out:
      shard = folder.shards[number]
      examples = _examples(shard, of_shards[number], whole)
      for dialogue, example in zip(shard, examples, strict=True):
        prompts.append(dialogue.tokens[: dialogue.answers[0][0]])
        if dialogue.temperature == 0:
          greedy.append(example)
    held_out += greedy[: training.held_out_answers]
  if not held_out:
    names = ', '.join(str(x.folder) for x in data)
    raise ValueError(
      f'no held-out answer in {names} is greedy: make more data with '
      'Synthesis.greedy_share above 0, or add a folder of greedy answers'
    )
  return Split(train=train, held_out=held_out, prompts=prompts)


def _examples(
  shard: Sequence[Dialogue],
  vectors: Sequence[features.Vectors] | None,
  whole: bool,
) -> list[batches_lib.Example]:
  of_each = vectors or [{}] * len(shard)
  return [
    batches_lib.example(dialogue, found, whole)
    for dialogue, found in zip(shard, of_each, strict=True)
  ]


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
