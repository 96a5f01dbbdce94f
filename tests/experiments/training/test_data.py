"""The data that a run reads from folders that grow."""

import dataclasses
import pathlib

import numpy as np
import pytest

from experiments.training import data
from experiments.training_data import batches
from experiments.training_data import data_folder
from experiments.training_data import dialogues
from experiments.training_data import schedule


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


def _first(*folders, training=_TRAINING):
  return data.TrainingData.first(training, folders)


def _again(records, *folders, training=_TRAINING):
  return data.TrainingData.of(training, folders, records)


def test_what_was_read_is_found_again():
  a, b = _folder('a', 7), _folder('b', 4, seed=1)
  first = _first(a, b)
  assert first.train == [[[1, 2, 4, 5], [1, 2]]]
  assert first.held_out == [[0, 3], [0, 3]]  # two shards have 4 answers
  records = [first.record()]
  more_a, c = _folder('a', 9), _folder('c', 2, seed=2)
  found = _again(records, more_a, b, c)
  assert found.train == [[[1, 2, 4, 5], [1, 2], []]]
  grown = found.grown(_TRAINING, [more_a, b, c], 40)
  assert grown.train[1] == [[7, 8], [], [1]]
  assert grown.held_out == [[0, 3], [0, 3], []]
  records.append(grown.record())
  again = _again(records, more_a, b, c)
  assert (again.train, again.held_out) == (grown.train, grown.held_out)
  assert again.first_steps == [0, 40]
  assert again.grown(_TRAINING, [more_a, b, c], 50) is None
  # Shards that are not read are empty.
  assert [len(x) for x in again.folders[0].shards] == [2] * 6 + [0, 2, 2]


def test_fewer_tokens_are_the_first_shards():
  few = dataclasses.replace(_TRAINING, max_tokens=9)
  a = _folder('a', 7)
  first = _first(a, training=few)
  assert first.train == [[[1, 2]]]
  assert first.grown(few, [a], 10) is None
  assert first.grown(_TRAINING, [a], 10).train[1] == [[4, 5]]


def test_held_out_shards_without_greedy_answers_are_passed_over():
  a = _folder('a', 7)
  sampled = [dataclasses.replace(d, temperature=1.0) for d in a.shards[0]]
  a = dataclasses.replace(a, shards=[sampled, *a.shards[1:]])
  first = _first(a)
  assert first.held_out == [[3, 6]]
  assert _again([first.record()], a).held_out == [[3, 6]]


def test_other_data_are_refused():
  a, b = _folder('a', 4), _folder('b', 4, seed=1)
  records = [_first(a, b).record()]
  with pytest.raises(ValueError, match=r'names 1 folders, but .* has read 2'):
    _again(records, a)
  lacks = 'lacks a shard that this run has read'
  with pytest.raises(ValueError, match=f'b {lacks}'):
    _again(records, b, a)
  with pytest.raises(ValueError, match=f'b {lacks}'):
    _again(records, a, _folder('b', 2, seed=1))
  other = dataclasses.replace(a, shards=[a.shards[1], *a.shards[1:]])
  with pytest.raises(ValueError, match=f'a {lacks}'):
    _again(records, other, b)


def test_the_draft_vocabulary_is_of_the_first_phase():
  example = lambda *answer: batches.Example(
    np.asarray([9, 9, *answer]), ((2, 2 + len(answer)),)
  )
  split = data.Split(
    train=[example(4, 4, 7), example(7, 4, 2, 0), example(2, 2, 2, 2)],
    phases=[schedule.Phase(0, 2), schedule.Phase(10, 3)],
    held_out=[],
    prompts=[],
  )
  found = data.draft_vocabulary(split, 3, 10)
  # 0 and 2 occur once each, so the lower one is taken.
  assert found.tolist() == [0, 4, 7]
  assert data.draft_vocabulary(split, None, 10) is None
