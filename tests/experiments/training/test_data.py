"""The data that a run reads from its folders."""

import dataclasses
import pathlib

import numpy as np

from experiments.training import data
from experiments.training_data import batches
from experiments.training_data import data_folder
from experiments.training_data import dialogues


@dataclasses.dataclass(frozen=True)
class _Settings:
  """The settings of `training.Training` that are read."""

  held_out_every: int = 3
  held_out_answers: int = 4
  max_tokens: int | None = None


_TRAINING = _Settings()


def _folder(name, num_shards, seed=0):
  """Returns a folder with two dialogues of 4 learned tokens per shard."""

  def shard(number):
    rng = np.random.default_rng([seed, number])
    return [
      dialogues.Dialogue(
        *(rng.integers(100, size=6, dtype=np.int32), ((2, 6),), 0.0),
        *(dialogues.Source.SAMPLED, True, 0),
      )
      for _ in range(2)
    ]

  shards = [shard(number) for number in range(num_shards)]
  return data_folder.Data(pathlib.Path(name), None, shards, {})


def test_some_shards_are_held_out_and_the_others_trained_on():
  a, b = _folder('a', 7), _folder('b', 4, seed=1)
  found = data.TrainingData.of(_TRAINING, [a, b])
  assert found.train == [[1, 2, 4, 5], [1, 2]]
  assert found.held_out == [[0, 3], [0, 3]]  # two shards have 4 answers
  # Shards that are not read are empty.
  assert [len(x) for x in found.folders[0].shards] == [2] * 6 + [0]


def test_fewer_tokens_are_the_first_shards():
  few = dataclasses.replace(_TRAINING, max_tokens=9)
  found = data.TrainingData.of(few, [_folder('a', 7)])
  assert found.train == [[1, 2]]
  # Shards that are made later change nothing.
  more = data.TrainingData.of(few, [_folder('a', 9)])
  assert more.digests() == found.digests()


def test_held_out_shards_without_greedy_answers_are_passed_over():
  a = _folder('a', 7)
  sampled = [dataclasses.replace(d, temperature=1.0) for d in a.shards[0]]
  a = dataclasses.replace(a, shards=[sampled, *a.shards[1:]])
  assert data.TrainingData.of(_TRAINING, [a]).held_out == [[3, 6]]


def test_other_data_have_other_digests():
  folders = [_folder('a', 4), _folder('b', 4, seed=1)]
  digests = lambda *folders: data.TrainingData.of(_TRAINING, folders).digests()
  own = digests(*folders)
  assert own == digests(*folders)
  shards = folders[0].shards
  swapped = dataclasses.replace(
    folders[0], shards=[shards[1], shards[0], *shards[2:]]
  )
  for others in (
    folders[:1],
    folders[::-1],
    [_folder('a', 5), folders[1]],
    [swapped, folders[1]],
  ):
    assert digests(*others) != own


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
  example = lambda *answer: batches.Example(
    np.asarray([9, 9, *answer]), ((2, 2 + len(answer)),)
  )
  split = data.Split(
    train=[example(4, 4, 7), example(7, 4, 2, 0)],
    held_out=[],
    prompts=[],
  )
  found = data.draft_vocabulary(split, 3, 10)
  # 0 and 2 occur once each, so the lower one is taken.
  assert found.tolist() == [0, 4, 7]
  assert data.draft_vocabulary(split, None, 10) is None
