"""The data that a run reads from its folders."""

import dataclasses
import pathlib
import types

import numpy as np

from experiments.training import begin
from experiments.training_data import batches
from experiments.training_data import data_folder

_TRAINING = types.SimpleNamespace(
  held_out_every=3,
  held_out_answers=3,
  cache_hidden=True,
  objective=types.SimpleNamespace(reads_prompt=True),
)


def _folder(name, num_shards, seed=0):
  """Returns a folder with two dialogues of 4 learned tokens per shard."""

  def shard(number):
    rng = np.random.default_rng([seed, number])
    return [
      data_folder.Dialogue(
        *(rng.integers(100, size=6, dtype=np.int32), ((2, 6),), 0.0),
        *(data_folder.Source.SAMPLED, 0),
      )
      for _ in range(2)
    ]

  shards = [shard(number) for number in range(num_shards)]
  entries = [{'digest': f'{seed} {number}'} for number in range(num_shards)]
  return data_folder.Data(pathlib.Path(name), {'shards': entries}, shards)


def test_some_shards_are_held_out_and_the_others_trained_on():
  a, b = _folder('a', 7), _folder('b', 4, seed=1)
  found = begin.split(_TRAINING, [a, b], None)
  tokens = lambda examples: [x.tokens.tolist() for x in examples]
  of = lambda folder, numbers: [
    d.tokens.tolist() for n in numbers for d in folder.shards[n]
  ]
  assert tokens(found.train) == of(a, [1, 2, 4, 5]) + of(b, [1, 2])
  # At most three answers of each folder.
  assert tokens(found.held_out) == of(a, [0, 3])[:3] + of(b, [0, 3])[:3]
  assert len(found.prompts) == 6 + 4
  sampled = [dataclasses.replace(d, temperature=1.0) for d in a.shards[0]]
  a.shards[0] = sampled
  found = begin.split(_TRAINING, [a], None)
  assert tokens(found.held_out) == of(a, [3, 6])[:3]


def test_other_data_have_other_digests():
  folders = [_folder('a', 4), _folder('b', 4, seed=1), _folder('a', 5)]
  assert len({folder.digest() for folder in folders}) == 3
  assert folders[0].digest() == _folder('c', 4).digest()


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
  example = lambda *answer: batches.Example(
    np.asarray([9, 9, *answer]), ((2, 2 + len(answer)),)
  )
  split = begin.Split(
    train=[example(4, 4, 7), example(7, 4, 2, 0)],
    held_out=[],
    prompts=[],
  )
  found = begin.draft_vocabulary(split, 3, 10)
  # 0 and 2 occur once each, so the lower one is taken.
  assert found.tolist() == [0, 4, 7]
  assert begin.draft_vocabulary(split, None, 10) is None
